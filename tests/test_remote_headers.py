"""Headers from a server that answers, redirects, refuses, breaks off, stalls and lies."""

import json

import pytest
from support.badfiles import OK, good, header, index
from support.range_server import COMMIT, Served, Trouble, serving

from introspect import analyze
from introspect.cli import main
from introspect.errors import CheckpointError, GatedModelError, HubError, ModelNotFoundError
from introspect.remote_headers import FIRST_BYTES, Patience, RemoteFile, read_hub

BIG = header({f"layer.{n}.weight": {**OK, "data_offsets": [4 * n, 4 * n + 4]} for n in range(4000)}, b"\1" * 16_000)
"""A file whose header does not fit into the first request."""


@pytest.fixture(autouse=True)
def no_token(monkeypatch, tmp_path):
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def pauses():
    return []


@pytest.fixture
def patience(pauses):
    return Patience(attempts=4, timeout=0.5, deadline=5, pause=pauses.append)


@pytest.fixture
def read(monkeypatch, patience):
    """Read a served repository's checkpoint; what was said on the way goes to `said`."""
    said = []

    def run(served):
        monkeypatch.setenv("HF_ENDPOINT", served.address)
        return read_hub("owner/model", None, said.append, patience)

    run.said = said
    return run


def test_one_file_takes_one_small_request(read):
    with serving(Served({"model.safetensors": good() + b"", "config.json": b"{}"})) as served:
        checkpoint = read(served)

    assert [tensor.name for header in checkpoint.headers for tensor in header.tensors] == ["a"]
    assert served.asked == [("model.safetensors", f"bytes=0-{FIRST_BYTES - 1}", False)]
    assert checkpoint.source == f"Hugging Face Hub owner/model (commit {COMMIT[:12]})"
    assert (checkpoint.kind, checkpoint.folder, checkpoint.unread) == ("hub", None, ())


def test_a_long_header_is_fetched_on_from_where_it_stopped(read):
    with serving(Served({"model.safetensors": BIG})) as served:
        checkpoint = read(served)

    assert len(checkpoint.headers[0].tensors) == 4000
    length = int.from_bytes(BIG[:8], "little")
    assert [range_ for _, range_, _ in served.asked] == [
        f"bytes=0-{FIRST_BYTES - 1}",
        f"bytes={FIRST_BYTES}-{8 + length - 1}",
    ]


def test_the_data_is_not_downloaded(read):
    weights = header({"a": {"dtype": "U8", "shape": [2**23], "data_offsets": [0, 2**23]}}, b"\0" * 2**23)

    with serving(Served({"model.safetensors": weights})) as served:
        checkpoint = read(served)

    assert checkpoint.headers[0].faults == ()
    assert served.sent < FIRST_BYTES + 1000  # and the listing


def test_a_server_without_ranges_is_left_once_the_header_is_there(read):
    weights = header({"a": {"dtype": "U8", "shape": [2**25], "data_offsets": [0, 2**25]}}, b"\0" * 2**25)

    with serving(Served({"model.safetensors": weights}, ranges=False)) as served:
        checkpoint = read(served)

    assert (len(checkpoint.headers), checkpoint.headers[0].faults) == (1, ())
    assert served.sent < 2**24  # the socket's buffers, not the file


def test_a_server_without_ranges_and_lengths(read):
    with serving(Served({"model.safetensors": good()}, ranges=False, lengths=False)) as served:
        checkpoint = read(served)

    assert checkpoint.headers[0].file_bytes == len(good())


def test_shards_of_an_index_are_fetched_and_others_are_strays(read):
    files = {
        "model.safetensors.index.json": index({"a": "m1.safetensors", "b": "m2.safetensors"}, 8).encode(),
        "m1.safetensors": good(),
        "m2.safetensors": good(("b",)),
        "old.safetensors": good(("c",)),
        "pytorch_model.bin": b"\x80",
    }
    with serving(Served(files)) as served:
        checkpoint = read(served)

    assert {header.file for header in checkpoint.headers} == {"m1.safetensors", "m2.safetensors"}
    assert checkpoint.strays == ("old.safetensors",)
    assert {file for file, _, _ in served.asked} == {"model.safetensors.index.json", "m1.safetensors", "m2.safetensors"}
    assert read.said[-1] == "fetching headers of owner/model: 2 of 2"


def test_a_redirect_is_followed_and_takes_no_token_along(read, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with serving(Served({"model.safetensors": good()})) as store, serving(Served({"model.safetensors": b""})) as served:
        elsewhere = store.address.replace("127.0.0.1", "localhost") + "/blob/model.safetensors"
        served.troubles["model.safetensors"] = [Trouble(location=elsewhere)]
        checkpoint = read(served)

    assert len(checkpoint.headers) == 1
    assert served.asked[0][2] is True
    assert store.asked == [("model.safetensors", f"bytes=0-{FIRST_BYTES - 1}", False)]


def test_redirects_in_a_circle_end(read, pauses):
    with serving(Served({"model.safetensors": good()})) as served:
        served.troubles["model.safetensors"] = [
            Trouble(location=f"{served.address}/x/model.safetensors") for _ in range(500)
        ]
        checkpoint = read(served)

    (unread,) = checkpoint.unread
    assert (unread.kind, len(pauses)) == ("not_served", 3)
    assert "TooManyRedirects" in unread.found


@pytest.mark.parametrize("cut", [0, 5, 1000, FIRST_BYTES - 1])
@pytest.mark.parametrize("ranges", [True, False])
def test_an_answer_that_breaks_off_is_resumed(read, cut, ranges, pauses):
    with serving(Served({"model.safetensors": BIG}, ranges=ranges)) as served:
        served.troubles["model.safetensors"] = [Trouble(cut=cut)]
        checkpoint = read(served)

    assert len(checkpoint.headers[0].tensors) == 4000
    assert len(pauses) == 1
    if ranges:
        assert served.asked[1][1].startswith(f"bytes={cut}-")


def test_a_server_that_always_breaks_off_is_given_up(read, pauses):
    with serving(Served({"model.safetensors": BIG})) as served:
        served.troubles["model.safetensors"] = [Trouble(cut=0) for _ in range(50)]
        checkpoint = read(served)

    (unread,) = checkpoint.unread
    assert (unread.file, unread.kind) == ("model.safetensors", "not_served")
    assert "attempt 4 of 4" in unread.found
    assert pauses == [0.5, 1.0, 2.0]


def test_a_server_that_stalls_is_not_waited_for_long(read, pauses):
    with serving(Served({"model.safetensors": BIG})) as served:
        served.troubles["model.safetensors"] = [Trouble(stall=100)]
        checkpoint = read(served)

    assert len(checkpoint.headers[0].tensors) == 4000
    assert served.asked[1][1].startswith("bytes=100-")
    assert len(pauses) == 1


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_busy_servers_are_asked_again(read, status, pauses):
    with serving(Served({"model.safetensors": good()})) as served:
        served.troubles["model.safetensors"] = [Trouble(status=status), Trouble(status=status)]
        checkpoint = read(served)

    assert len(checkpoint.headers) == 1
    assert pauses == [0.5, 1.0]


def test_the_servers_own_pause_is_kept(read, pauses):
    with serving(Served({"model.safetensors": good()})) as served:
        served.troubles["model.safetensors"] = [Trouble(status=429, headers={"Retry-After": "3"})]
        checkpoint = read(served)

    assert (len(checkpoint.headers), pauses) == (1, [3.0])


def test_a_pause_of_an_hour_is_reported_instead(read, pauses):
    with serving(Served({"model.safetensors": good()})) as served:
        served.troubles["model.safetensors"] = [Trouble(status=429, headers={"Retry-After": "3600"})]
        checkpoint = read(served)

    assert pauses == []
    assert checkpoint.unread[0].found == "the server answered 429 Too Many Requests (attempt 1 of 4)"


@pytest.mark.parametrize(
    ("status", "found", "expected"),
    [
        (401, "the server answered 401 Unauthorized", "a token"),
        (403, "the server answered 403 Forbidden", "a token with access to this repository"),
        (404, "the server answered 404 Not Found", "the file"),
        (418, "the server answered 418 I'm a Teapot", "the file"),
    ],
)
def test_a_refused_shard_is_an_unread_file_at_once(read, status, found, expected, pauses):
    with serving(Served({"model.safetensors": good()})) as served:
        served.troubles["model.safetensors"] = [Trouble(status=status)]
        checkpoint = read(served)

    (unread,) = checkpoint.unread
    assert (unread.kind, unread.found, unread.expected, pauses) == ("not_served", found, expected, [])


def test_a_shard_that_the_repository_does_not_have(read):
    files = {"model.safetensors.index.json": index({"a": "gone.safetensors"}).encode(), "x.safetensors": good()}
    with serving(Served(files)) as served:
        checkpoint = read(served)

    assert [(unread.file, unread.kind) for unread in checkpoint.unread] == [("gone.safetensors", "not_served")]


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"Content-Range": "bytes 7-20/100"}, "another range than asked for ('bytes 7-20/100')"),
        ({"Content-Range": "nonsense"}, "another range than asked for ('nonsense')"),
        ({"Content-Encoding": "gzip"}, "a compressed answer, whose bytes are not the file's"),
    ],
)
def test_a_server_that_lies_is_not_believed(read, headers, words):
    with serving(Served({"model.safetensors": good()}, override=headers)) as served:
        checkpoint = read(served)

    assert checkpoint.unread[0].found.startswith(words)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "empty_file"),
        (b"\x80\x04" + b"." * 300, "pickle_file"),
        (good()[:-2], "truncated"),
        (good()[:20], "header_beyond_file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "lfs_pointer"),
    ],
)
def test_bad_files_are_named_over_the_network_too(read, content, kind):
    with serving(Served({"model.safetensors": content})) as served:
        checkpoint = read(served)

    kinds = [unread.kind for unread in checkpoint.unread]
    kinds += [fault.kind for header in checkpoint.headers for fault in header.faults]
    assert kinds == [kind]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"pytorch_model.bin": b"\x80"}, "only pytorch_model.bin"),
        ({"README.md": b""}, "no .safetensors file; it holds README.md"),
        ({}, "it holds nothing"),
        ({"model.safetensors.index.json": b"<html>"}, "not JSON"),
        ({"../model.safetensors": good(), "a/b.safetensors": good()}, "it holds nothing"),
    ],
)
def test_a_repository_without_a_checkpoint(read, files, words):
    with serving(Served(files)) as served, pytest.raises(CheckpointError) as error:
        read(served)
    assert words in str(error.value)


def test_an_index_that_is_not_served_says_why(read):
    files = {"model.safetensors.index.json": index({"a": "m.safetensors"}).encode()}
    troubles = {"model.safetensors.index.json": [Trouble(status=403)]}
    with serving(Served(files, troubles)) as served, pytest.raises(CheckpointError, match="answered 403 Forbidden"):
        read(served)


def test_no_server_at_all(monkeypatch, patience):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")

    with pytest.raises(HubError, match=r"no answer from http://127\.0\.0\.1:1"):
        read_hub("owner/model", None, lambda text: None, patience)


def test_a_slow_trickle_meets_the_deadline():
    with serving(Served({"x": BIG})) as served:
        remote = RemoteFile(f"{served.address}/x", "x", Patience(deadline=-1, pause=lambda seconds: None))
        with pytest.raises(Exception, match="bytes in -1 s"):
            remote.span(0, len(BIG))


def test_check_through_the_command(monkeypatch, tiny_llama, capsys):
    files = {path.name: path.read_bytes() for path in tiny_llama.iterdir()}
    with serving(Served(files)) as served:
        monkeypatch.setenv("HF_ENDPOINT", served.address)
        code = main(["check", str(tiny_llama), "owner/model", "--format", "json"])

    result = json.loads(capsys.readouterr().out)
    assert (code, result["tables"]["findings"]["rows"]) == (0, [])
    assert (result["totals"]["tensors"], result["totals"]["missing"]) == (21, 0)
    assert "Hugging Face Hub owner/model" in result["notes"][0]


def test_check_offline_asks_nobody(monkeypatch):
    with serving(Served({"model.safetensors": good()})) as served:
        monkeypatch.setenv("HF_ENDPOINT", served.address)
        with pytest.raises(ModelNotFoundError, match="drop --offline"):
            analyze("check", "owner/model", offline=True)

    assert served.asked == []


def test_a_cached_snapshot_needs_no_server(monkeypatch, tmp_path):
    snapshot = tmp_path / "hub" / "models--owner--model" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_bytes(good())
    refs = tmp_path / "hub" / "models--owner--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)

    result = analyze("check", "owner/model", offline=True, files_only=True)

    assert result.totals["tensors"] == 1
    assert "local Hub cache of owner/model" in result.notes[0]


def test_a_gated_repository(monkeypatch, patience):
    from support.hub_server import Hub, Repo
    from support.hub_server import serving as serving_hub

    with serving_hub(Hub({"owner/model": Repo({}, gated=401)})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        with pytest.raises(GatedModelError, match="no token was found"):
            read_hub("owner/model", None, lambda text: None, patience)
