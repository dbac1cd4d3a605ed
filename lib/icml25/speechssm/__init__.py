"""SpeechSSM: minutes of speech from a model with a constant memory."""
