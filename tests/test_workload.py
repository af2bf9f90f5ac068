"""The workload without a network: presets, shipped data, and what is taken from the hub or not."""

import importlib.util
import itertools
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import datasets
import huggingface_hub
import pytest
import torch
import torch.distributed as dist
import transformers
from datasets.arrow_writer import ArrowWriter

from zero1_helpers.measure.environment import describe_model
from zero1_helpers.training import workload
from zero1_helpers.training.presets import PRESETS, get_preset, set_seed
from zero1_helpers.training.workload import (
    DATA_FOLDER,
    DATA_NAME,
    MODEL_NAME,
    describe_data,
    get_dataloader,
    get_dataset,
    get_sentence_pairs,
    get_smol_model,
    get_smol_tokenizer,
    meta_smol_model,
    shard_dataset,
)

SMOL = "smollm2-360m"


@pytest.fixture(autouse=True)
def no_hub(monkeypatch, tmp_path):
    """No network, empty caches, no memory of earlier answers."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.delenv("ZERO1_PRESET", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    workload._say.cache_clear()
    hub_answers = workload._hub_answers  # tests replace it
    hub_answers.cache_clear()
    yield
    hub_answers.cache_clear()


@pytest.fixture(scope="module")
def tokens():
    return get_dataset("tiny")


def make_data_module():
    path = Path(__file__).parent.parent / "tools" / "make_data.py"
    spec = importlib.util.spec_from_file_location("make_data", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# presets


def test_default_preset(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert get_preset() is PRESETS["small"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert get_preset() is PRESETS[SMOL]
    monkeypatch.setenv("ZERO1_PRESET", "tiny")
    assert get_preset() is PRESETS["tiny"]
    assert get_preset(SMOL) is PRESETS[SMOL]
    own = replace(PRESETS["tiny"], name="own", batch_size=2)
    assert get_preset(own) is own


def test_unknown_preset_is_one_clear_line(monkeypatch):
    with pytest.raises(
        ValueError, match="unknown preset 'big': choose one of tiny, small, smollm2-360m$"
    ):
        get_smol_model("big")
    monkeypatch.setenv("ZERO1_PRESET", "huge")
    with pytest.raises(ValueError, match=r"'huge' in \$ZERO1_PRESET: choose one of"):
        get_dataset()


# models


def test_full_size_on_meta_costs_nothing():
    model = meta_smol_model(SMOL)
    about = describe_model(model)
    assert (about["parameters"], about["tensors"]) == (361_823_040, 291)
    assert about["dtype"] == "bfloat16"
    assert all(p.is_meta for p in model.parameters())
    config = model.config
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (960, 32, 49_152)
    assert config.rope_parameters["rope_theta"] == 100_000
    assert (config.pad_token_id, config.max_position_embeddings) == (2, 8192)
    # the post's split by count: rank 0 holds the embedding
    sizes, bounds = [p.numel() for p in model.parameters()], (0, 73, 146, 219, 291)
    shards = [sum(sizes[a:b]) for a, b in itertools.pairwise(bounds)]
    assert shards == [125_844_480, 79_580_160, 78_965_760, 77_432_640]


def test_tiny_has_the_shape_of_the_family():
    model = get_smol_model("tiny")
    assert type(model) is type(meta_smol_model(SMOL))
    about = describe_model(model)
    assert about == {
        "name": "tiny Llama",
        "parameters": 869_760,
        "tensors": 39,
        "dtype": "float32",
        "source": "random weights",
    }
    assert about["tensors"] % 4 != 0
    embedding = model.get_input_embeddings().weight.numel() / about["parameters"]
    assert 0.13 < embedding < 0.17
    assert model.training and model.config._attn_implementation == "sdpa"
    assert model.config.vocab_size == len(get_smol_tokenizer("tiny"))
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_random_weights_follow_the_seed():
    def weights(seed):
        set_seed(seed)
        return torch.nn.utils.parameters_to_vector(get_smol_model("tiny").parameters())

    assert torch.equal(weights(314), weights(314))
    assert not torch.equal(weights(314), weights(315))


def test_describe_sees_through_a_wrapper():
    model = get_smol_model("tiny")
    wrapped = torch.nn.Module()
    wrapped.module = model
    assert describe_model(wrapped) == describe_model(model)
    assert describe_model(torch.nn.Linear(2, 2))["source"] == "unknown"


def test_the_same_forward_twice_and_no_cache_in_the_output(tokens):
    set_seed()
    model = get_smol_model("tiny")
    batch = next(iter(get_dataloader(tokens["train"])))
    first, second = model(**batch), model(**batch)
    assert torch.equal(first.loss, second.loss)  # in training mode: no dropout
    assert first.logits.shape == (8, 2) and set(first) == {"loss", "logits"}


# data and tokenizer


def test_shipped_files_are_what_the_generator_makes():
    make_data = make_data_module()
    files = make_data.make_files()
    assert files == make_data.make_files()
    for name, text in files.items():
        assert (DATA_FOLDER / name).read_text(encoding="utf-8") == text, name


def test_pairs_have_mrpc_columns_and_balance():
    pairs = get_sentence_pairs("tiny")
    assert {split: len(rows) for split, rows in pairs.items()} == {"train": 640, "validation": 128}
    seen = set()
    for rows in pairs.values():
        assert set(rows.column_names) == {"sentence1", "sentence2", "label", "idx"}
        assert rows["idx"] == list(range(len(rows)))
        assert rows.features["label"].names == ["not_equivalent", "equivalent"]
        assert 0.6 < sum(rows["label"]) / len(rows) < 0.72
        texts = list(zip(rows["sentence1"], rows["sentence2"], strict=True))
        assert all(a != b and a[0].isupper() | a[0].isdigit() for a, b in texts)
        assert seen.isdisjoint(texts) and len(set(texts)) == len(texts)
        seen.update(texts)


def test_tokenizer_round_trip():
    tokenizer = get_smol_tokenizer("tiny")
    rows = get_sentence_pairs("tiny")["validation"]
    for text in [*rows["sentence1"], "Zürich – 東京, ünseen!"]:
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    one, two = rows[0]["sentence1"], rows[0]["sentence2"]
    pair = tokenizer(one, two)
    assert set(pair) == {"input_ids", "attention_mask"}
    assert tokenizer.decode(pair["input_ids"]) == f"{one}<sep>{two}<sep>"
    assert tokenizer.pad_token_id == 2 == get_smol_model("tiny").config.pad_token_id


def test_tokens_and_batches(tokens):
    train = tokens["train"]
    assert set(train.column_names) == {"labels", "input_ids", "attention_mask"}
    assert len({len(ids) for ids in train["input_ids"]}) == 1  # every batch has one shape
    batches = list(get_dataloader(train))
    assert len(batches) == 640 // 8
    for batch in batches:
        assert set(batch) == {"labels", "input_ids", "attention_mask"}
        assert batch["labels"].shape == (8,)
        assert batch["input_ids"].shape == batch["attention_mask"].shape == (8, 56)
        assert {t.dtype for t in batch.values()} == {torch.int64}
        assert torch.equal(batch["input_ids"] != 2, batch["attention_mask"].bool())
    few = get_dataloader(train.select(range(21)), batch_size=5)
    assert [len(batch["labels"]) for batch in few] == [5] * 4


def test_ragged_rows_are_padded_to_a_multiple_of_eight():
    rows = [{"input_ids": [5] * n, "attention_mask": [1] * n, "labels": 0} for n in (3, 9)]
    batch = next(iter(get_dataloader(rows, batch_size=2, preset="tiny")))
    assert batch["input_ids"].shape == (2, 16)
    assert sorted(batch["attention_mask"].sum(1).tolist()) == [3, 9]


def test_order_depends_on_the_seed_alone(tokens):
    def order(seed, noise):
        torch.manual_seed(noise)
        before = torch.get_rng_state()
        ids = torch.cat([b["input_ids"] for b in get_dataloader(tokens["train"], seed=seed)])
        assert torch.equal(before, torch.get_rng_state())  # and it leaves the global state alone
        return ids

    assert torch.equal(order(314, 1), order(314, 2))
    assert not torch.equal(order(314, 1), order(315, 1))


def test_describe_data(tokens):
    train = tokens["train"].shuffle(seed=314)
    expected = {
        "name": "sentence pairs",
        "source": "zero1_helpers/data/paraphrases.jsonl",
        "examples": 160,
        "batch_size": 8,
        "tokens_per_batch": 8 * 56,
    }
    assert describe_data(shard_dataset(train, 1, 4)) == expected
    assert describe_data(train, batch_size=2)["tokens_per_batch"] == 2 * 56


# shards


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 640])
def test_shards_are_equal_disjoint_and_cover(world_size, capsys):
    rows = datasets.Dataset.from_dict({"n": list(range(640))})
    shards = [shard_dataset(rows, rank, world_size)["n"] for rank in range(world_size)]
    length, dropped = divmod(640, world_size)
    assert {len(shard) for shard in shards} == {length}
    assert [n for shard in shards for n in shard] == list(range(640 - dropped))
    said = f"640 examples on {world_size} ranks: {length} each, {dropped} dropped\n"
    assert capsys.readouterr().out == (said if dropped else "")


def test_bad_shards_are_refused(tokens):
    rows = datasets.Dataset.from_dict({"n": [1, 2, 3]})
    with pytest.raises(ValueError, match="rank 4 of 4: ranks go from 0"):
        shard_dataset(rows, 4, 4)
    with pytest.raises(ValueError, match="rank -1 of 4"):
        shard_dataset(rows, -1, 4)
    with pytest.raises(ValueError, match="rank 0 of 0"):
        shard_dataset(rows, 0, 0)
    with pytest.raises(ValueError, match="3 examples are too few for 4 ranks"):
        shard_dataset(rows, 0, 4)
    with pytest.raises(ValueError, match="one split"):
        shard_dataset(tokens, 0, 4)


# the hub, its cache, or neither


def no_model(monkeypatch):
    """The full-size model without its weights: what is chosen matters here, not 700 MB of bf16."""
    build = transformers.AutoModelForSequenceClassification.from_config

    def on_meta(*args, **kwargs):
        with torch.device("meta"):
            return build(*args, **kwargs)

    monkeypatch.setattr(transformers.AutoModelForSequenceClassification, "from_config", on_meta)


def test_substitutes_are_named_once(monkeypatch, capsys):
    no_model(monkeypatch)
    model, tokens = get_smol_model(SMOL), get_dataset(SMOL)
    why = "(not in the hub's cache, and the hub cannot be reached)"
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"preset {SMOL}, model: random weights instead of pretrained {MODEL_NAME} {why}",
        f"preset {SMOL}, data: zero1_helpers/data/paraphrases.jsonl "
        f"instead of nyu-mll/glue mrpc {why}",
        f"preset {SMOL}, tokenizer: zero1_helpers/data/tokenizer.json "
        f"instead of {MODEL_NAME} {why}",
    ]
    about = describe_model(model)
    assert (about["parameters"], about["tensors"]) == (361_823_040, 291)
    assert lines[0].endswith(about["source"])
    assert lines[1].endswith(describe_data(tokens["train"])["source"])
    get_smol_model(SMOL), get_dataset(SMOL)
    assert capsys.readouterr().out == ""
    get_smol_model("tiny")
    assert capsys.readouterr().out == "preset tiny, model: random weights\n"
    monkeypatch.setenv("RANK", "1")
    get_smol_tokenizer("tiny")
    assert capsys.readouterr().out == ""


def test_pretrained_is_insisted_on():
    with pytest.raises(ValueError, match="pretrained=True, but .* random weights instead of"):
        get_smol_model(SMOL, pretrained=True)
    with pytest.raises(ValueError, match="pretrained=True, but preset tiny"):
        get_smol_model("tiny", pretrained=True)


def test_offline_asks_nobody(monkeypatch):
    def ask(*args, **kwargs):
        raise AssertionError("asked the hub")

    asked = []
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *a, **k: asked.append(a))
    assert workload._hub_answers() is False and not asked
    workload._hub_answers.cache_clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    assert workload._hub_answers() is True and len(asked) == 1
    assert workload._hub_answers() is True and len(asked) == 1  # once per process
    workload._hub_answers.cache_clear()
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", ask)
    assert workload._hub_answers() is False


def test_a_hub_that_never_answers_does_not_hold_us(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(workload, "PROBE_SECONDS", 0.05)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *a, **k: time.sleep(60))
    assert workload._hub_answers() is False  # and not after a minute: pytest's limit


def test_with_a_hub_the_real_things_are_loaded(monkeypatch, capsys):
    calls = {}

    def fake(name, result):
        def load(*args, **kwargs):
            calls[name] = (args, kwargs)
            return result

        return load

    tiny, words = get_smol_model("tiny"), get_smol_tokenizer("tiny")
    pairs = get_sentence_pairs("tiny")
    capsys.readouterr()
    monkeypatch.setattr(workload, "_hub_answers", lambda: True)
    monkeypatch.setattr(
        transformers.AutoModelForSequenceClassification, "from_pretrained", fake("model", tiny)
    )
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fake("tokenizer", words))
    monkeypatch.setattr(datasets, "load_dataset", fake("data", pairs))
    model, tokens = get_smol_model(SMOL), get_dataset(SMOL)
    assert calls == {
        "model": ((MODEL_NAME,), dict(num_labels=2, dtype="bfloat16", local_files_only=False)),
        "data": (("nyu-mll/glue", "mrpc"), {}),
        "tokenizer": ((MODEL_NAME,), dict(local_files_only=False)),
    }
    assert describe_model(model)["source"] == f"pretrained {MODEL_NAME}"
    assert describe_data(tokens["train"])["source"] == "nyu-mll/glue mrpc"
    assert "instead of" not in capsys.readouterr().out


@pytest.fixture
def filled_caches(tmp_path):
    """The hub's two caches as it lays them out, with a small model and four pairs in them."""
    folder = tmp_path / "hub" / ("models--" + MODEL_NAME.replace("/", "--"))
    snapshot = folder / "snapshots" / ("0" * 40)
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    get_smol_model("tiny").bfloat16().save_pretrained(snapshot)
    get_smol_tokenizer("tiny").save_pretrained(snapshot)

    path = tmp_path / "datasets" / DATA_NAME[0].replace("/", "___") / "mrpc" / "0.0.0" / ("1" * 40)
    path.mkdir(parents=True)
    rows = get_sentence_pairs("tiny")["train"].select(range(4))
    with ArrowWriter(features=rows.features, path=str(path / "glue-train.arrow")) as writer:
        for row in rows:
            writer.write(row)
        examples, size = writer.finalize()
    info = {
        "config_name": "mrpc",
        "dataset_name": "glue",
        "features": rows.features.to_dict(),
        "splits": {
            "train": {
                "name": "train",
                "num_examples": examples,
                "num_bytes": size,
                "dataset_name": "glue",
            }
        },
    }
    (path / "dataset_info.json").write_text(json.dumps(info))


def test_a_filled_cache_is_used_without_the_hub(monkeypatch, capsys, filled_caches):
    def ask():
        raise AssertionError("asked the hub")

    def load(*args):
        offline.append(datasets.config.HF_HUB_OFFLINE)
        return load_dataset(*args)

    offline, load_dataset = [], datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(workload, "_hub_answers", ask)
    model, tokens = get_smol_model(SMOL), get_dataset(SMOL)
    assert offline == [True] and datasets.config.HF_HUB_OFFLINE is False
    assert describe_model(model) == {
        "name": "SmolLM2-360M",
        "parameters": 869_760,
        "tensors": 39,
        "dtype": "bfloat16",
        "source": f"pretrained {MODEL_NAME}",
    }
    assert describe_data(tokens["train"])["source"] == "nyu-mll/glue mrpc"
    assert len(tokens["train"]) == 4
    assert "instead of" not in capsys.readouterr().out


def test_model_and_data_are_looked_up_apart(filled_caches, tmp_path):
    shutil.rmtree(tmp_path / "datasets")
    assert describe_model(get_smol_model(SMOL))["source"] == f"pretrained {MODEL_NAME}"
    source = describe_data(get_dataset(SMOL)["train"])["source"]
    assert source.startswith("zero1_helpers/data/paraphrases.jsonl instead of nyu-mll/glue mrpc")


def test_ranks_take_the_first_answer(monkeypatch, capsys):
    no_model(monkeypatch)
    monkeypatch.setattr(workload, "_hub_answers", lambda: True)  # here the hub answers ...
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set("zero1 model", "own")  # ... but another rank has decided already
        assert describe_model(get_smol_model(SMOL))["source"].startswith("random weights instead")
        use_hub, _ = workload._choose(PRESETS[SMOL], "data")
        assert use_hub and store.get("zero1 data") == b"hub"  # nobody had: ours stands
    finally:
        dist.destroy_process_group()


def test_bars_and_verbosity_are_given_back(tokens, capfd):
    logging = transformers.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.enable_progress_bar(), datasets.enable_progress_bars()
    try:
        get_smol_model("tiny"), get_dataset("tiny"), next(iter(get_dataloader(tokens["train"])))
        assert logging.is_progress_bar_enabled() and datasets.is_progress_bar_enabled()
        assert logging.get_verbosity() == before[0]
        assert capfd.readouterr().err == ""
    finally:
        if not before[1]:
            logging.disable_progress_bar()
