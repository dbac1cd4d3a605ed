"""Long-form speech generation with state-space models (SpeechSSM)."""
