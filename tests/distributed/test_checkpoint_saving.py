"""save_pretrained on real ranks: the files are those of transformers, whatever the mesh, and whole or not there."""

import os
import re
import resource
import signal
import time
from datetime import timedelta
from pathlib import Path

import models
import pytest
import torch
import torch.distributed as dist
import workers
from pool import Pool, RankTimeout
from saving_support import contents, differing, with_scaled_heads
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from workers import FSDP2_TP2, FSDP4, REPLICATE2_FSDP2, TP2_FSDP2

import ndcompile
from ndcompile.checkpoint import rank_writes, writing

UNEVEN = {"num_hidden_layers": 2, "vocab_size": 131}
ONE = {"num_hidden_layers": 1}
EP4 = (("ep", 4),)
EP2_TP2 = (("ep", 2), ("tp", 2))


def _save(name, overrides, checkpoint, folder, layouts, size="50GB"):
    for layout in layouts:
        model = workers.compiled(name, layout, checkpoint, overrides)
        report = ndcompile.save_pretrained(model, Path(folder, str(layout)), size)
    return report.bytes_written


@pytest.mark.parametrize(
    ("name", "overrides", "layouts"),
    [
        ("llama", {**UNEVEN, "tie_word_embeddings": True}, [FSDP4, REPLICATE2_FSDP2, TP2_FSDP2]),
        ("phi3", ONE, [FSDP4, FSDP2_TP2]),
        ("mixtral", ONE, [FSDP2_TP2, EP4, EP2_TP2]),
        ("gpt_oss", ONE, [FSDP2_TP2, EP4]),
        ("deepseek_v3", {"num_hidden_layers": 2}, [FSDP2_TP2, EP2_TP2]),
    ],
    ids=["llama", "phi3", "mixtral", "gpt_oss", "deepseek_v3"],
)
def test_files_are_those_of_transformers_on_every_mesh(name, overrides, layouts, ranks, checkpoint, tmp_path):
    expected = checkpoint(name, **overrides)
    ranks(_save, name, overrides, expected, str(tmp_path), layouts)
    assert sorted(os.listdir(tmp_path)) == sorted(map(str, layouts))
    for layout in layouts:
        assert differing(tmp_path / str(layout), expected) == []


def test_files_are_split_as_transformers_splits_them(ranks, checkpoint, tmp_path):
    models.build("llama", **UNEVEN).save_pretrained(tmp_path / "expected", max_shard_size="60KB")
    folder = checkpoint("llama", **UNEVEN)
    ranks(_save, "llama", UNEVEN, folder, str(tmp_path), [FSDP2_TP2], "60KB")
    assert len(list((tmp_path / "expected").glob("*.safetensors"))) > 3
    assert differing(tmp_path / str(FSDP2_TP2), tmp_path / "expected") == []


def test_experts_are_split_alike_on_every_mesh(ranks, checkpoint, tmp_path):
    folder = checkpoint("mixtral", **ONE)
    layouts = [FSDP4, EP4, FSDP2_TP2]
    ranks(_save, "mixtral", ONE, folder, str(tmp_path), layouts, "60KB")
    for layout in layouts[1:]:
        assert differing(tmp_path / str(layout), tmp_path / str(FSDP4)) == []
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / str(EP4))
    expected = models.build("mixtral", **ONE).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in saved.state_dict().items())


def test_every_byte_is_written_by_one_rank(ranks, checkpoint, tmp_path):
    folder = checkpoint("llama", **UNEVEN)
    for layout in [FSDP2_TP2, REPLICATE2_FSDP2]:
        written = ranks(_save, "llama", UNEVEN, folder, str(tmp_path), [layout])
        total = sum(p.numel() * 4 for p in models.build("llama", **UNEVEN).parameters())
        assert sum(written) == total
        assert max(written) < 0.4 * total


def _save_scaled(checkpoint, folder):
    model = with_scaled_heads(workers.compiled("llama", FSDP2_TP2, checkpoint, UNEVEN))
    model.save_pretrained(folder)


def test_keys_that_are_computed_pass_through_one_rank(ranks, checkpoint, tmp_path):
    with_scaled_heads(models.build("llama", **UNEVEN)).save_pretrained(tmp_path / "expected")
    ranks(_save_scaled, checkpoint("llama", **UNEVEN), str(tmp_path / "saved"))
    assert differing(tmp_path / "saved", tmp_path / "expected") == []
    assert b"layers.1.mlp.w2.weight" in contents(tmp_path / "saved")["model.safetensors"]


def _save_over(checkpoint, folder, fault):
    """Save with a fault on rank 2; the error."""
    model = workers.compiled("llama", FSDP4, checkpoint, UNEVEN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    last = dist.get_rank() == 2
    original = rank_writes.scatter
    try:
        if last and fault == "file size":
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        if last and fault == "exception":
            rank_writes.scatter = None
        with pytest.raises(ndcompile.NdcompileError if fault == "file size" or not last else TypeError) as error:
            model.save_pretrained(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        rank_writes.scatter = original
    model.save_pretrained(f"{folder} 2")  # the ranks can go on
    return str(error.value)


@pytest.mark.parametrize(
    ("fault", "own", "others"),
    [
        ("file size", r"model\.safetensors: \d+ bytes at byte \d+ cannot be written: File too large", "File too large"),
        ("exception", "not callable", "rank 2: TypeError"),
    ],
)
def test_a_fault_on_one_rank_raises_on_all_and_leaves_the_checkpoint_before(
    fault, own, others, ranks, checkpoint, tmp_path
):
    folder = tmp_path / "saved"
    models.build("llama", **ONE).save_pretrained(folder)
    before = contents(folder)
    messages = ranks(_save_over, checkpoint("llama", **UNEVEN), str(folder), fault)
    assert re.search(own, messages[2])
    for message in messages[:2] + messages[3:]:
        assert re.search(
            rf"Saving to .*saved stopped while writing: Rank \d stops, as .*{others}.*is as it was", message
        )
    assert contents(folder) == before
    assert sorted(os.listdir(tmp_path)) == ["saved", "saved 2"]


def _save_and_die(checkpoint, folder, notes):
    """Rank 3 is killed in the middle of its writes; the others note their error."""
    model = workers.compiled("llama", FSDP4, checkpoint, UNEVEN)
    ndcompile.set_agreement_timeout(model, timedelta(seconds=5))
    rank = dist.get_rank()
    if rank == 3:
        original, calls = writing._pwrite, iter(range(100))

        def write_some(*args):
            if next(calls) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            original(*args)

        writing._pwrite = write_some
    start = time.monotonic()
    try:
        model.save_pretrained(folder)
    except ndcompile.AgreementError as error:
        Path(notes, str(rank)).write_text(f"{time.monotonic() - start:.0f} s {error}")


def test_a_rank_that_is_killed_ends_the_save_of_the_others(checkpoint, tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()
    folder = tmp_path / "parent" / "saved"
    models.build("llama", **ONE).save_pretrained(folder)
    before = contents(folder)
    pool = Pool(4, tmp_path)
    try:
        with pytest.raises(RankTimeout, match="rank 3 died"):
            pool(_save_and_die, checkpoint("llama", **UNEVEN), str(folder), str(notes))
    finally:
        pool.stop()
    assert sorted(os.listdir(notes)) == ["0", "1", "2"]
    for note in notes.iterdir():
        assert re.search(r"stopped while writing: .* for ranks \[3\] .* is as it was", note.read_text(), re.DOTALL)
    assert contents(folder) == before
    assert os.listdir(folder.parent) == ["saved"]


def _save_elsewhere(checkpoint, folders):
    workers.compiled("llama", FSDP4, checkpoint, UNEVEN).save_pretrained(folders[dist.get_rank()])


def test_ranks_that_save_to_different_folders_are_told_so(ranks, checkpoint, tmp_path):
    folders = [str(tmp_path / name) for name in "aaab"]
    for kind, message in ranks.errors(_save_elsewhere, checkpoint("llama", **UNEVEN), folders):
        assert kind == "AgreementError"
        assert re.search(r"Ranks differ in what they save, and where.*ranks \[3\]: folder .*/b", message, re.DOTALL)
    assert os.listdir(tmp_path) == []


def _save_experts(checkpoint, folder):
    config = DistributedConfig(fsdp_size=4, tp_size=2, ep_size=4)
    layout = (("fsdp", 4), ("tp", 2))
    model = workers.compiled("mixtral", layout, checkpoint, ONE, distributed_config=config)
    ndcompile.save_pretrained(model, folder)


def test_experts_over_a_part_of_the_fsdp_ranks(world, checkpoint, tmp_path):
    expected = checkpoint("mixtral", **ONE)
    world(8)(_save_experts, expected, str(tmp_path / "saved"))
    assert differing(tmp_path / "saved", expected) == []
