"""The workload: a small Llama that says whether two sentences mean the same, and its data.

Names and defaults are the post's. A preset says how large:

- `smollm2-360m`: SmolLM2-360M-Instruct and GLUE MRPC from the hub or its cache. What cannot be had
  is replaced, and this is said: the same architecture with random weights, the pairs in `data/`.
- `small`: the same family with 12.3 million float32 parameters: seconds a step on a few CPU cores, so that
  computing takes its time beside communication, as it did for the post;
- `tiny`: 870 thousand parameters, when only the result matters (tests).
"""

import functools
import json
import os
import threading
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist

from zero1_helpers._groups import need
from zero1_helpers.training.presets import COMMON_SEED, PRESETS, Preset, get_preset

MODEL_NAME = "HuggingFaceTB/SmolLM2-360M-Instruct"
DATA_NAME = ("nyu-mll/glue", "mrpc")  # the post's "glue": names without an owner no longer load
DATA_FOLDER = Path(__file__).parents[1] / "data"
PROBE_SECONDS = 4  # a hub that takes longer to answer counts as unreachable
SOURCES = {  # what: (from the hub, the project's own)
    "model": (f"pretrained {MODEL_NAME}", "random weights"),
    "tokenizer": (MODEL_NAME, "zero1_helpers/data/tokenizer.json"),
    "data": (" ".join(DATA_NAME), "zero1_helpers/data/paraphrases.jsonl"),
}


def _cached(what: str) -> bool:
    """Whether the hub's local cache holds the data, or the model and its tokenizer."""
    if what == "data":
        from datasets import config

        folder = Path(config.HF_DATASETS_CACHE).expanduser() / DATA_NAME[0].replace("/", "___")
        return any(folder.glob(f"{DATA_NAME[1]}/*/*/dataset_info.json"))
    from huggingface_hub import try_to_load_from_cache

    files = ("config.json", "model.safetensors", "tokenizer.json")
    return all(isinstance(try_to_load_from_cache(MODEL_NAME, file), str) for file in files)


@functools.cache
def _hub_answers() -> bool:
    """Ask the hub about one small file; in a thread, as a name look-up knows no time limit."""
    import huggingface_hub as hub

    answers = []

    def ask():
        with suppress(Exception):  # whatever it is: not reachable
            url = hub.hf_hub_url(MODEL_NAME, "config.json")
            answers.append(hub.get_hf_file_metadata(url, timeout=PROBE_SECONDS))

    if not hub.constants.HF_HUB_OFFLINE:
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(PROBE_SECONDS)
    return bool(answers)


@functools.cache
def _say(text: str) -> None:
    """Print once per process, and on rank 0 only."""
    if (dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))) == 0:
        print(text, flush=True)


def _choose(preset: Preset, what: str) -> tuple[bool, str]:
    """(whether `what` comes from the hub or its cache, its source in words), alike on all ranks.

    The first rank to know writes the answer into the process group's store and the others take it:
    this needs no collective, so a single rank may ask too.
    """
    hub, own = SOURCES[what]
    use_hub = preset.hub and (_cached(what) or _hub_answers())
    if preset.hub and dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        answer = store.compare_set(f"zero1 {what}", "", "hub" if use_hub else "own")
        use_hub = answer == b"hub"
    reason = f" instead of {hub} (not in the hub's cache, and the hub cannot be reached)"
    source = hub if use_hub else own + (reason if preset.hub else "")
    _say(f"preset {preset.name}, {what}: {source}")
    return use_hub, source


@contextmanager
def _quiet(from_cache: bool = False):
    """Keep the libraries' bars and chatter off; `from_cache`: load a data set without asking."""
    import datasets
    from transformers.utils import logging

    with ExitStack() as undo:
        for lib in (logging, datasets.logging):
            undo.callback(lib.set_verbosity, lib.get_verbosity())
            lib.set_verbosity_error()
        if logging.is_progress_bar_enabled():
            undo.callback(logging.enable_progress_bar)
            logging.disable_progress_bar()  # also the hub's own
        if datasets.is_progress_bar_enabled():
            undo.callback(datasets.enable_progress_bars)
            datasets.disable_progress_bars()
        undo.callback(setattr, datasets.config, "HF_HUB_OFFLINE", datasets.config.HF_HUB_OFFLINE)
        datasets.config.HF_HUB_OFFLINE |= from_cache
        yield


def get_smol_model(preset: str | Preset | None = None, pretrained: bool | None = None):
    """A Llama with a 2-label head, on the CPU, in the preset's dtype, in training mode.

    `pretrained`: None takes the hub's weights if they can be had, False never looks, True insists.
    Random weights are drawn from torch's global generator, so call set_seed() first.
    """
    need("transformers", "datasets")
    from transformers import AutoModelForSequenceClassification, LlamaConfig

    preset = get_preset(preset)
    use_hub, source = (False, "random weights") if pretrained is False else _choose(preset, "model")
    if pretrained and not use_hub:
        raise ValueError(f"pretrained=True, but preset {preset.name} has to use {source}")
    with _quiet():
        if use_hub:
            model = AutoModelForSequenceClassification.from_pretrained(
                MODEL_NAME, num_labels=2, dtype=preset.dtype, local_files_only=_cached("model")
            )
        else:
            model = AutoModelForSequenceClassification.from_config(
                LlamaConfig(**preset.config), dtype=getattr(torch, preset.dtype)
            )
    model.config.use_cache = False  # nothing is generated: no keys and values kept in the output
    model.zero1_info = {"name": preset.title, "source": source}
    return model.train()


def meta_smol_model(preset: str | Preset | None = "smollm2-360m"):
    """The same model without storage, on torch's meta device: names, shapes and dtypes only."""
    with torch.device("meta"):
        return get_smol_model(preset, pretrained=False)


def get_smol_tokenizer(preset: str | Preset | None = None):
    """The preset's tokenizer; its pad token has id 2, as the model's config says."""
    need("transformers", "datasets")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    use_hub, _ = _choose(get_preset(preset), "tokenizer")
    with _quiet():
        if use_hub:
            return AutoTokenizer.from_pretrained(MODEL_NAME, local_files_only=_cached("tokenizer"))
        return PreTrainedTokenizerFast(
            tokenizer_file=str(DATA_FOLDER / "tokenizer.json"),
            unk_token="<unk>",
            sep_token="<sep>",
            pad_token="<pad>",
            model_max_length=512,
            padding_side="right",
            model_input_names=["input_ids", "attention_mask"],
        )


def get_sentence_pairs(preset: str | Preset | None = None):
    """The raw pairs, a DatasetDict by split: sentence1, sentence2, label, idx, as in MRPC."""
    need("datasets", "transformers")
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Value, load_dataset

    preset = get_preset(preset)
    use_hub, source = _choose(preset, "data")
    if use_hub:
        with _quiet(from_cache=_cached("data")):
            pairs = load_dataset(*DATA_NAME)
    else:
        features = Features(
            sentence1=Value("string"),
            sentence2=Value("string"),
            idx=Value("int32"),
            label=ClassLabel(names=["not_equivalent", "equivalent"]),
        )
        splits = {"train": [], "validation": []}
        for line in (DATA_FOLDER / "paraphrases.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            splits[row.pop("split")].append(row)
        # built in memory: nothing goes into a cache that other ranks write too
        pairs = DatasetDict(
            {split: Dataset.from_list(rows, features=features) for split, rows in splits.items()}
        )
    for split in pairs.values():
        split.info.description = source
        split.info.dataset_name = "GLUE MRPC" if use_hub else "sentence pairs"
        split.info.config_name = preset.name  # get_dataloader pads by it
    return pairs


def get_dataset(preset: str | Preset | None = None):
    """The pairs as tokens, a DatasetDict: labels, input_ids and attention_mask, each (length,).

    As in the post, a pair is padded to the longest one; here that is the longest of its split, so
    that all batches of a split have one shape and all ranks the same work.
    """
    pairs, tokenizer = get_sentence_pairs(preset), get_smol_tokenizer(preset)

    def tokenize(rows):
        return tokenizer(rows["sentence1"], rows["sentence2"], truncation=True, padding=True)

    with _quiet():
        tokens = pairs.map(
            tokenize,
            batched=True,
            batch_size=None,
            keep_in_memory=True,
            remove_columns=["idx", "sentence1", "sentence2"],
        )
        return tokens.rename_columns({"label": "labels"})


def shard_dataset(dataset, rank: int, world_size: int):
    """Rank's part of one split: equal lengths, no overlap; the remainder is dropped, and said."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of {world_size}: ranks go from 0 to world_size - 1")
    if isinstance(dataset, dict):
        raise ValueError(f"shard one split, not all of {list(dataset)}: dataset['train']")
    length, dropped = divmod(len(dataset), world_size)
    if length == 0:
        raise ValueError(f"{len(dataset)} examples are too few for {world_size} ranks")
    if dropped and rank == 0:
        print(f"{len(dataset)} examples on {world_size} ranks: {length} each, {dropped} dropped")
    return dataset.select(range(rank * length, (rank + 1) * length))


def _preset_of(ds) -> Preset:
    name = getattr(getattr(ds, "info", None), "config_name", None)
    return get_preset(name if name in PRESETS else None)


def get_dataloader(
    ds, batch_size: int | None = None, seed: int = COMMON_SEED, preset: str | Preset | None = None
):
    """Shuffled batches of labels (batch,) and input_ids, attention_mask (batch, length), int64.

    `batch_size` and tokenizer: the preset's, which is that of `ds` unless named. The order depends
    on `seed` alone. Lengths are multiples of 8; a last batch that would be smaller is dropped.
    """
    preset = get_preset(preset) if preset else _preset_of(ds)
    tokenizer = get_smol_tokenizer(preset)
    tokenizer.deprecation_warnings["Asking-to-pad-a-fast-tokenizer"] = True  # "said already"

    def collate(rows):
        return tokenizer.pad(rows, padding="longest", pad_to_multiple_of=8, return_tensors="pt")

    return torch.utils.data.DataLoader(
        ds,
        batch_size=batch_size or preset.batch_size,
        shuffle=True,
        drop_last=True,
        collate_fn=collate,
        generator=torch.Generator().manual_seed(seed),
    )


def describe_data(ds, batch_size: int | None = None) -> dict:
    """{name, source, examples, batch_size, tokens_per_batch} of one split or shard, per rank."""
    info = ds.info
    batch_size = batch_size or _preset_of(ds).batch_size
    longest = max(len(ids) for ids in ds["input_ids"])
    tokens = batch_size * -(-longest // 8) * 8
    return {
        "name": info.dataset_name,
        "source": info.description,
        "examples": len(ds),
        "batch_size": batch_size,
        "tokens_per_batch": tokens,
    }
