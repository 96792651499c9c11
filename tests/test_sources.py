import errno
import hashlib
import json
import os
from pathlib import Path

import pytest
from support.hub_server import COMMIT, Hub, Repo, serving

from introspect import hub as hub_module
from introspect.errors import (
    ConfigError,
    ConfigFileError,
    FileAccessError,
    GatedModelError,
    HubError,
    IntrospectError,
    ModelNotFoundError,
    OptionError,
    RevisionNotFoundError,
)
from introspect.sources import resolve

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64}
OTHER_COMMIT = "f" * 40


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def refusal(error, model, **options):
    """The one line that says why MODEL is refused."""
    with pytest.raises(error) as caught:
        resolve(str(model), **options)
    assert isinstance(caught.value, IntrospectError)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub of our own, an empty cache, no token, and pauses noted instead of slept."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    pauses = []
    monkeypatch.setattr(hub_module, "sleep", pauses.append)
    with serving(Hub(repos={"org/model": Repo(files={"config.json": json.dumps(LLAMA).encode()})})) as served:
        served.pauses = pauses
        monkeypatch.setenv("HF_ENDPOINT", served.address)
        yield served


class TestPaths:
    def test_a_config_file_of_any_json_name(self, tmp_path):
        path = write(tmp_path / "tiny.json", LLAMA)
        source = resolve(str(path))
        assert (source.id, source.kind, source.text) == (str(path), "file", f"file {path}")
        assert source.config == LLAMA
        assert source.config_sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
        assert source.directory == tmp_path
        assert source.stable

    def test_a_folder_with_config_json(self, tmp_path):
        write(tmp_path / "config.json", LLAMA)
        source = resolve(str(tmp_path))
        assert (source.kind, source.config) == ("directory", LLAMA)

    def test_the_quantisers_file_beside_it_is_carried_and_part_of_the_digest(self, tmp_path):
        write(tmp_path / "config.json", LLAMA)
        plain = resolve(str(tmp_path))
        write(tmp_path / "hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}})
        quantised = resolve(str(tmp_path))
        assert plain.hf_quant_config is None
        assert quantised.hf_quant_config == {"quantization": {"quant_algo": "NVFP4"}}
        assert quantised.config_sha256 == plain.config_sha256
        assert quantised.digest != plain.digest

    def test_a_path_comes_before_a_catalog_name(self, tmp_path, monkeypatch):
        folder = tmp_path / "meta-llama" / "Meta-Llama-3-8B"
        folder.mkdir(parents=True)
        write(folder / "config.json", LLAMA)
        monkeypatch.chdir(tmp_path)
        assert resolve("meta-llama/Meta-Llama-3-8B").kind == "directory"

    def test_infinity_and_a_byte_order_mark_are_read(self, tmp_path):
        path = write(tmp_path / "c.json", b'\xef\xbb\xbf{"model_type": "mamba2", "time_step_limit": [0.0, Infinity]}')
        assert resolve(str(path)).config["time_step_limit"] == [0.0, float("inf")]

    @pytest.mark.parametrize(
        ("content", "found"),
        [
            (b"", "the file is empty"),
            (b" \n", "the file is empty"),
            (
                b"{'model_type': 'llama'}",
                "not JSON: Expecting property name enclosed in double quotes at line 1 column 2",
            ),
            (b'{"model_type": "llama"', "not JSON: Expecting ',' delimiter at line 1 column 23"),
            (b'["llama"]', "the JSON is a list, not an object"),
            (b"null", "the JSON is null, not an object"),
            (b'"llama"', "the JSON is a string, not an object"),
            (b"12", "the JSON is a number, not an object"),
            (b'{"hidden_size": 1, "hidden_size": 2}', "key 'hidden_size' appears twice"),
            (b'{"a": {"b": 1, "b": 2}}', "key 'b' appears twice"),
            (b"\xff\xfe{\x00}\x00", "not UTF-8 text (byte 0)"),
            (b"[" * 100_000, "not JSON that can be read: nested too deeply"),
            (b'{"a": ' + b"9" * 5000 + b"}", "not JSON that can be read: Exceeds the limit"),
            (b" " * (16 * 2**20 + 1), "more than the 16777216 bytes that are read of such a file"),
        ],
    )
    def test_what_is_no_config_says_what_it_is(self, tmp_path, content, found):
        path = write(tmp_path / "config.json", content)
        message = refusal(ConfigFileError, path)
        assert message.startswith(f"{path}: {found}")
        assert message.endswith("expected one JSON object, a transformers config.json")

    def test_json_that_is_no_model_config(self, tmp_path):
        assert refusal(ConfigFileError, write(tmp_path / "a.json", {"hidden_size": 1})).endswith(
            "names neither model_type nor architectures; expected a transformers config.json"
        )
        index = write(tmp_path / "model.safetensors.index.json", {"metadata": {}, "weight_map": {}})
        assert refusal(ConfigFileError, index).endswith("a checkpoint index; expected the config.json beside it")

    def test_names_of_the_wrong_type(self, tmp_path):
        message = refusal(ConfigError, write(tmp_path / "a.json", {"model_type": 7}))
        assert message.endswith("config field 'model_type' is 7, expected a string such as 'llama'")
        message = refusal(ConfigError, write(tmp_path / "a.json", {"architectures": "LlamaForCausalLM"}))
        assert "config field 'architectures' is 'LlamaForCausalLM', expected a list of class names" in message

    def test_a_folder_without_config_says_what_it_holds(self, tmp_path):
        assert refusal(ConfigFileError, tmp_path) == (
            f"{tmp_path}: a folder without config.json (it is empty); expected config.json in it"
        )
        for name in "abcdefg":
            (tmp_path / f"{name}.bin").touch()
        (tmp_path / "a_folder").mkdir()
        message = refusal(ConfigFileError, tmp_path)
        assert "(it holds a.bin, a_folder/, b.bin, c.bin, d.bin and 3 more)" in message

    @pytest.mark.parametrize(
        ("name", "content", "found"),
        [
            ("m.gguf", b"GGUF\x03", "a GGUF file, which names no transformers class"),
            ("m.bin", b"PK\x03\x04", "a pickled checkpoint, which is never opened"),
            ("m.pkl", b"\x80\x05", "a pickled checkpoint, which is never opened"),
            ("m.safetensors", b"\x08\0\0\0\0\0\0\0{}", "a safetensors file: weights without their config"),
            ("config.yaml", b"a: 1", "a file whose name does not end in .json"),
            ("model.py", b"", "a Python file"),
        ],
    )
    def test_other_files_are_named_and_not_opened(self, tmp_path, name, content, found):
        path = write(tmp_path / name, content)
        assert refusal(ConfigFileError, path).startswith(f"{path}: {found}; expected ")

    def test_links_that_lead_nowhere(self, tmp_path):
        loop = tmp_path / "loop"
        loop.symlink_to(loop)
        assert refusal(ConfigFileError, loop).startswith(f"{loop}: a symbolic link that leads back to itself")
        broken = tmp_path / "broken.json"
        broken.symlink_to("gone.json")
        assert "a symbolic link to gone.json, which is missing" in refusal(ConfigFileError, broken)
        (tmp_path / "config.json").symlink_to("config.json")
        assert "config.json: a symbolic link that leads back to itself" in refusal(ConfigFileError, tmp_path)

    def test_a_config_that_is_no_regular_file(self, tmp_path):
        os.mkfifo(tmp_path / "config.json")
        assert "config.json: not a regular file" in refusal(ConfigFileError, tmp_path)

    def test_a_file_that_may_not_be_read(self, tmp_path, monkeypatch):
        def denied(*args):
            raise PermissionError(errno.EACCES, "Permission denied")

        path = write(tmp_path / "config.json", LLAMA)
        monkeypatch.setattr(Path, "open", denied)
        assert refusal(FileAccessError, path) == f"{path}: cannot read it: Permission denied"
        monkeypatch.setattr(Path, "stat", denied)
        assert refusal(FileAccessError, path) == f"{path}: cannot read it: Permission denied"

    def test_a_revision_of_a_path_is_refused(self, tmp_path):
        path = write(tmp_path / "config.json", LLAMA)
        assert refusal(OptionError, path, revision="main") == (
            f"--revision: got 'main', expected no revision: {path} is a path, and only Hub models have any"
        )

    @pytest.mark.parametrize(
        "model", ["./nothing", "/nowhere/config.json", "a/b/c", "a b", "", "a\0b", "../x", "config.json", "a/m.gguf"]
    )
    def test_a_path_that_is_not_there(self, model):
        message = refusal(ModelNotFoundError, model)
        assert "no such file or folder, and not a Hub id; expected a config.json, a folder with one" in message


class TestFactories:
    def test_a_factory_is_found_and_not_run(self, tmp_path):
        path = write(tmp_path / "model.py", b"raise SystemExit('ran')\n")
        source = resolve(f"{path}:build")
        assert (source.kind, source.factory, source.config) == ("factory", "build", {})
        assert source.text == f"factory build of {path}"
        assert source.digest == hashlib.sha256(path.read_bytes()).hexdigest()
        assert not source.stable

    def test_what_is_missing(self, tmp_path):
        assert "no such file: nowhere.py" in refusal(ModelNotFoundError, "nowhere.py:build")
        path = write(tmp_path / "model.py", b"")
        assert refusal(ConfigFileError, path).endswith(f"expected the name of a factory in it, as {path}:build")


class TestCatalog:
    @pytest.mark.parametrize(
        "name", ["meta-llama/Meta-Llama-3.1-8B", "meta-llama/Llama-3.1-8B", "META-LLAMA/llama-3.1-8b"]
    )
    def test_every_spelling_finds_the_same_entry_without_network(self, name):
        source = resolve(name, offline=True)
        assert (source.id, source.kind) == ("meta-llama/Meta-Llama-3.1-8B", "catalog")
        assert source.text.startswith("built-in catalog (copied from ai-dynamo/aiconfigurator:")
        assert source.config["rope_scaling"]["rope_type"] == "llama3"

    def test_a_revision_is_never_answered_by_it(self, hub):
        assert refusal(HubError, "meta-llama/Meta-Llama-3-8B", revision="v1", offline=True) == (
            "meta-llama/Meta-Llama-3-8B: revision 'v1' is not in the local Hub cache, and offline; "
            "drop --offline (and HF_HUB_OFFLINE) to ask the Hub"
        )
        assert hub.asked == []
        hub.repos["meta-llama/Meta-Llama-3-8B"] = Repo(files={"config.json": json.dumps(LLAMA).encode()})
        assert resolve("meta-llama/Meta-Llama-3-8B", revision="main").config == LLAMA

    def test_the_quantisers_file_is_carried(self):
        source = resolve("nvidia/Qwen3-32B-NVFP4")
        assert source.hf_quant_config["quantization"]["quant_algo"] == "NVFP4"

    @pytest.mark.parametrize(
        ("name", "nearest"),
        [
            ("meta-llama/Meta-Llama-3-8b-hf", "meta-llama/Meta-Llama-3-8B"),
            ("Meta-Llama-3-8B", "meta-llama/Meta-Llama-3-8B"),
            ("deepseek/DeepSeek-V3", "deepseek-ai/DeepSeek-V3"),
            ("mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1"),
        ],
    )
    def test_a_name_without_a_match_suggests_the_nearest(self, hub, name, nearest):
        message = refusal(ModelNotFoundError, name, offline=True)
        assert message.startswith(f"no model {name!r}: not a path, not in the built-in catalog or the local Hub cache")
        assert f"did you mean {nearest}" in message

    def test_a_name_like_no_other_points_to_the_list(self, hub):
        assert refusal(ModelNotFoundError, "zzz/qqq", offline=True).endswith(
            "see `introspect models` for the built-in ones"
        )


class TestHub:
    def test_a_config_is_fetched_once_and_then_cached(self, hub):
        first = resolve("org/model")
        assert (first.kind, first.config, first.text) == ("hub", LLAMA, f"Hugging Face Hub (commit {COMMIT})")
        asked = len(hub.asked)
        second = resolve("org/model")
        assert (second.kind, second.text) == ("cache", f"local Hub cache (commit {COMMIT})")
        assert second.digest == first.digest
        assert resolve("org/model", offline=True).kind == "cache"
        assert len(hub.asked) == asked

    def test_no_weights_are_asked_for(self, hub):
        hub.repos["org/model"].files["model.safetensors"] = b"weights"
        resolve("org/model")
        assert {path.rpartition("/")[2] for _, path in hub.asked} == {"config.json", "hf_quant_config.json"}

    def test_a_branch_and_a_commit(self, hub):
        hub.repos["org/model"].revisions["v2"] = OTHER_COMMIT
        assert OTHER_COMMIT in resolve("org/model", revision="v2").text
        assert COMMIT in resolve("org/model", revision=COMMIT).text

    def test_an_unknown_revision(self, hub):
        assert refusal(RevisionNotFoundError, "org/model", revision="v9") == (
            "org/model has no revision 'v9': give a branch, tag or full commit hash of it"
        )

    def test_a_renamed_repository_is_followed(self, hub):
        hub.repos["org/old"] = Repo(files={}, moved_to="org/model")
        assert resolve("org/old").config == LLAMA

    def test_the_quantisers_file_is_fetched(self, hub):
        hub.repos["org/model"].files["hf_quant_config.json"] = b'{"quantization": {}}'
        assert resolve("org/model").hf_quant_config == {"quantization": {}}

    def test_the_token_of_the_environment_is_sent(self, hub, monkeypatch):
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        resolve("org/model")
        assert set(hub.tokens) == {"Bearer hf_secret"}

    @pytest.mark.parametrize("status", [401, 403])
    def test_a_gated_repository_says_how_to_get_in(self, hub, monkeypatch, status):
        hub.repos["org/model"].gated = status
        message = refusal(GatedModelError, "org/model")
        assert message.startswith("org/model is a gated repository and no token was found: accept its licence on")
        assert "set HF_TOKEN" in message
        assert "`introspect models`" in message
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        assert "your token has no access to it" in refusal(GatedModelError, "org/model")

    def test_a_repository_that_is_not_there(self, hub):
        message = refusal(ModelNotFoundError, "mistralai/Mixtral-8x7B")
        assert "the Hub has no such repository; if it is private, set HF_TOKEN" in message
        assert "did you mean mistralai/Mixtral-8x7B-v0.1" in message

    def test_a_repository_without_config(self, hub):
        hub.repos["org/gguf"] = Repo(files={"model.gguf": b"GGUF"})
        assert refusal(ConfigFileError, "org/gguf") == (
            "org/gguf: the repository has no config.json (a GGUF, adapter or diffusers repository?); "
            "expected a transformers model repository"
        )

    def test_a_config_of_absurd_size_is_not_fetched(self, hub):
        hub.repos["org/model"].files["config.json"] = b" " * (16 * 2**20 + 1)
        assert "org/model/config.json: 16777217 bytes on the Hub" in refusal(ConfigFileError, "org/model")
        assert [method for method, _ in hub.asked] == ["HEAD"]

    def test_a_damaged_config_on_the_hub(self, hub):
        hub.repos["org/model"].files["config.json"] = b"<html>"
        assert "config.json: not JSON" in refusal(ConfigFileError, "org/model")

    @pytest.mark.parametrize("status", [429, 500, 503])
    def test_a_busy_server_is_asked_again(self, hub, status):
        hub.repos["org/model"].answers = [(status, {}), (status, {"Retry-After": "3"})]
        assert resolve("org/model").config == LLAMA
        assert hub.pauses == [1.0, 3.0]

    @pytest.mark.parametrize(("status", "reason"), [(429, "Too Many Requests"), (502, "Bad Gateway")])
    def test_and_then_given_up(self, hub, status, reason):
        hub.repos["org/model"].answers = [(status, {})] * 9
        assert refusal(HubError, "org/model") == (
            f"org/model: the Hub at {hub.address} answered {status} {reason}; wait and try again"
        )
        assert hub.pauses == [1.0, 2.0]
        assert len(hub.asked) == 3

    def test_a_long_wait_is_reported_instead_of_slept(self, hub):
        hub.repos["org/model"].answers = [(429, {"Retry-After": "3600"})] * 9
        assert "answered 429" in refusal(HubError, "org/model")
        assert hub.pauses == []

    def test_another_refusal_is_not_repeated(self, hub):
        hub.repos["org/model"].answers = [(403, {})] * 9
        assert refusal(HubError, "org/model").endswith("answered 403 Forbidden; check the token and the address")
        assert len(hub.asked) == 1

    def test_no_network(self, hub, monkeypatch):
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
        message = refusal(HubError, "org/model")
        assert message.startswith("org/model: no answer from http://127.0.0.1:1 (ConnectError: ")
        assert "check network, proxy and HF_ENDPOINT, give a local config.json, or see `introspect models`" in message

    @pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
    def test_offline_by_environment(self, hub, monkeypatch, name):
        monkeypatch.setenv(name, "1")
        message = refusal(ModelNotFoundError, "org/model")
        assert "offline; drop --offline (and HF_HUB_OFFLINE) to ask the Hub" in message
        assert hub.asked == []

    @pytest.mark.parametrize("model", ["org/a--b", "org/a..b", "org/model.git", "x" * 300])
    def test_names_the_hub_does_not_allow(self, hub, model):
        assert "not a Hub id" in refusal(ModelNotFoundError, model)


CODE_CONFIG = LLAMA | {
    "auto_map": {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XModel"}
}
CODE = {"configuration_x.py": b"a = 1", "modeling_x.py": b"b = 2", "helper.py": b"c = 3"}


class TestRemoteCode:
    def test_it_is_neither_fetched_nor_used_unless_trusted(self, hub):
        hub.repos["org/code"] = Repo(files={"config.json": json.dumps(CODE_CONFIG).encode(), **CODE})
        source = resolve("org/code")
        assert not source.remote_code
        assert not any(path.endswith(".py") for _, path in hub.asked)
        assert list(Path(source.directory).glob("*.py")) == []

    def test_trusted_code_is_fetched_and_part_of_the_digest(self, hub):
        hub.repos["org/code"] = Repo(
            files={"config.json": json.dumps(CODE_CONFIG).encode(), **CODE, "w.safetensors": b"w"}
        )
        plain = resolve("org/code")
        source = resolve("org/code", trust_remote_code=True)
        assert source.remote_code
        assert {path.name for path in source.directory.iterdir()} == {"config.json", *CODE}
        assert source.digest != plain.digest
        assert resolve("org/code", trust_remote_code=True, offline=True).digest == source.digest

    def test_code_of_another_repository_is_nothing_a_digest_covers(self, tmp_path):
        write(tmp_path / "config.json", LLAMA | {"auto_map": {"AutoModel": "org/code--modeling_x.XModel"}})
        trusted = resolve(str(tmp_path), trust_remote_code=True, offline=True)
        assert (trusted.remote_code, trusted.stable, trusted.offline) == (True, False, True)
        assert resolve(str(tmp_path)).stable
        assert resolve(str(tmp_path)).digest != trusted.digest

    def test_code_that_is_missing(self, tmp_path):
        write(tmp_path / "config.json", CODE_CONFIG)
        assert resolve(str(tmp_path)).remote_code is False
        message = refusal(ConfigFileError, tmp_path, trust_remote_code=True)
        assert "auto_map names configuration_x.py, which is not beside it" in message


def test_finding_a_model_imports_no_torch(tmp_path):
    import subprocess
    import sys

    path = write(tmp_path / "config.json", LLAMA)
    code = (
        "import sys; from introspect.sources import resolve; "
        f"resolve({str(path)!r}); resolve('openai/gpt-oss-20b'); "
        "print([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
