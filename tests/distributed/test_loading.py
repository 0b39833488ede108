"""Loading on real ranks: checksums, and checkpoints that torch.distributed.checkpoint wrote in shards."""

import os
import re
import shutil
import signal
import time
from datetime import timedelta
from pathlib import Path

import models
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import workers
from pool import Pool, RankTimeout
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from workers import FSDP2_TP2, FSDP4

import ndcompile
from ndcompile.loader import reading

MOE = {"num_hidden_layers": 1}


def _load(folders, layout, name="mixtral"):
    model = workers.compiled(name, layout, None, MOE)
    report = ndcompile.load(model, folders[dist.get_rank() % len(folders)], verify="hash")
    plain = dict(models.build(name, **MOE).named_parameters())
    equal = all(torch.equal(workers.full(value), plain[key]) for key, value in model.state_dict().items())
    return equal, report.verified


@pytest.mark.parametrize("layout", [FSDP4, FSDP2_TP2], ids=str)
def test_checksums_of_all_ranks_are_those_of_the_files(ranks, checkpoint, layout):
    results = ranks(_load, [checkpoint("mixtral", **MOE)], layout)
    assert results == [(True, len(models.build("mixtral", **MOE).state_dict()))] * 4


def _load_fails(folders, layout):
    with pytest.raises(ndcompile.CheckpointError) as error:
        _load(folders, layout)
    return str(error.value)


def test_ranks_that_read_different_files_learn_which_tensor_differs(ranks, checkpoint, tmp_path):
    good = Path(checkpoint("mixtral", **MOE))
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"].view(torch.int32)[-1] ^= 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for message in ranks(_load_fails, [str(good), str(good), str(good), str(tmp_path)], FSDP4):
        assert "checksums of 1 of" in message
        assert re.search(r"model.norm.weight: every rank holds what it reads, so the ranks read different", message)


def _save_shards(checkpoint, folder, layout):
    model = workers.compiled("llama", layout, checkpoint, MOE)
    dcp.save(get_model_state_dict(model), storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True))


def _load_shards(folder, layout):
    model = workers.compiled("llama", layout, folder, MOE)
    plain = dict(models.build("llama", **MOE).named_parameters())
    return all(torch.equal(workers.full(value), plain[key]) for key, value in model.state_dict().items())


def test_safetensors_shards_of_dcp_load_on_another_mesh(ranks, checkpoint, tmp_path):
    ranks(_save_shards, checkpoint("llama", **MOE), str(tmp_path), FSDP2_TP2)
    assert len(list(tmp_path.glob("shard-*.safetensors"))) == 4
    assert ranks(_load_shards, str(tmp_path), FSDP4) == [True] * 4


def test_a_lost_shard_of_dcp_is_refused(ranks, checkpoint, tmp_path):
    ranks(_save_shards, checkpoint("llama", **MOE), str(tmp_path), FSDP2_TP2)
    sorted(tmp_path.glob("shard-*.safetensors"))[1].unlink()
    with pytest.raises(ndcompile.CheckpointError, match=r"the shards of key .* do not tile \(.*covered 0 times"):
        ndcompile.read_plan(models.on_meta("llama", **MOE), tmp_path, {"fsdp": 4})


def _load_while_a_file_shrinks(folder):
    """Rank 2's own copy of the checkpoint is cut while it reads it."""
    if dist.get_rank() == 2:
        original = reading._fills_directly

        def cut(read):
            reading._fills_directly = original
            os.truncate(read.file, read.file.stat().st_size - 1000)
            return original(read)

        reading._fills_directly = cut
    model = workers.compiled("llama", FSDP4, None, MOE)
    start = time.monotonic()
    with pytest.raises(ndcompile.NdcompileError) as error:
        ndcompile.load(model, f"{folder}/{dist.get_rank()}")
    return type(error.value).__name__, str(error.value), time.monotonic() - start


def test_a_file_that_shrinks_on_one_rank_ends_the_load_on_all(ranks, checkpoint, tmp_path):
    for rank in range(4):
        shutil.copytree(checkpoint("llama", **MOE), tmp_path / str(rank))
    for rank, (kind, message, seconds) in enumerate(ranks(_load_while_a_file_shrinks, str(tmp_path))):
        assert kind == ("CheckpointError" if rank == 2 else "AgreementError")
        assert re.search(r"2/model.safetensors (ends at byte|was changed)", message)
        assert rank == 2 or "rank 2: CheckpointError" in message
        assert seconds < 30


def _load_and_die(folder, notes):
    """Rank 3 is killed while it reads; the others note their error."""
    model = workers.compiled("llama", FSDP4, None, MOE)
    ndcompile.set_agreement_timeout(model, timedelta(seconds=5))
    if dist.get_rank() == 3:
        reading._fills_directly = lambda read: os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        ndcompile.load(model, folder)
    except ndcompile.AgreementError as error:
        Path(notes, str(dist.get_rank())).write_text(f"{time.monotonic() - start:.0f} s {error}")


def test_a_rank_that_is_killed_ends_the_load_of_the_others(checkpoint, tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()
    pool = Pool(4, tmp_path)
    try:
        with pytest.raises(RankTimeout, match="rank 3 died"):
            pool(_load_and_die, checkpoint("llama", **MOE), str(notes))
    finally:
        pool.stop()
    assert sorted(os.listdir(notes)) == ["0", "1", "2"]
    for note in notes.iterdir():
        assert re.match(r"[5-9] s .* waited 0:00:05 for ranks \[3\] to reach 'load1/done/", note.read_text())


def _forward_after_a_failed_load(folder, empty):
    model = workers.compiled("mixtral", FSDP4, folder, MOE)
    with pytest.raises(ndcompile.CheckpointError):
        ndcompile.load(model, empty)
    ids = models.token_ids(1, 8)
    with pytest.raises(ndcompile.NdcompileError, match=r"The last ndcompile.load failed.*Load again"):
        model(input_ids=ids)
    ndcompile.load(model, folder)
    return model(input_ids=ids).logits.isfinite().all().item()


def test_a_model_whose_load_failed_does_not_run_until_it_is_loaded_again(ranks, checkpoint, tmp_path):
    assert ranks(_forward_after_a_failed_load, checkpoint("mixtral", **MOE), str(tmp_path)) == [True] * 4
