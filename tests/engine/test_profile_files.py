"""Where profiles are kept: a file a machine, whole or not at all, and never another machine's. The catalogue of named machines."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from lohan.errors import ConfigError, StorageError
from lohan.hardware.catalog import NAMED_MACHINES
from lohan.hardware.probe import probe
from lohan.hardware.profile import PROFILE_VERSION, HardwareProfile
from lohan.hardware.profile_files import facts_of_device, find_block, load_profile, profile_path, save_profile, with_blocks
from lohan.planning.state_form import StateForm
from tests.engine.profiles import block_times, figure, machine_facts, machine_profile

# ---------------------------------------------------------------- a file a machine


def test_a_profile_is_found_again_as_it_was(tmp_path):
    facts = machine_facts()
    profile = machine_profile(facts)
    assert load_profile(tmp_path / "profiles", facts) is None
    path = save_profile(tmp_path / "profiles", profile)
    assert path == profile_path(tmp_path / "profiles", facts) == tmp_path / "profiles" / f"{facts.digest}.json"
    assert load_profile(tmp_path / "profiles", facts) == profile
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert HardwareProfile.model_validate_json(path.read_text()) == profile


def test_what_one_machine_has_not_is_kept_as_none(tmp_path):
    facts = machine_facts(gpus=0, drives=0)
    profile = machine_profile(facts, host_to_device=None, both_ways=None, ssd_read=None, commit_seconds=None, blocks=())
    save_profile(tmp_path, profile)
    assert load_profile(tmp_path, facts) == profile


@pytest.mark.parametrize("other", [{"gpus": 0}, {"gpus": 2}, {"drives": 0}, {"drives": 2}], ids=str)
def test_another_machine_has_no_profile(other, tmp_path):
    save_profile(tmp_path, machine_profile(machine_facts()))
    assert load_profile(tmp_path, machine_facts(**other)) is None


def test_another_machines_file_under_this_ones_name_is_refused(tmp_path):
    facts, other = machine_facts(), machine_facts(gpus=2)
    save_profile(tmp_path, machine_profile(other)).rename(profile_path(tmp_path, facts))
    with pytest.raises(ConfigError, match="another machine's") as caught:
        load_profile(tmp_path, facts)
    assert caught.value.remedy is not None and "lohan profile --again" in caught.value.remedy


def test_every_device_sees_a_machine_of_its_own():
    facts = machine_facts(gpus=2)
    seen = [facts_of_device(facts, uuid) for uuid in ("GPU-0", "GPU-1", None)]
    assert [[gpu.uuid for gpu in one.gpus] for one in seen] == [["GPU-0"], ["GPU-1"], []]
    assert len({facts.digest, *(one.digest for one in seen)}) == 4
    assert facts_of_device(machine_facts(), "GPU-0").digest == machine_facts().digest


# ---------------------------------------------------------------- files that cannot be used


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not JSON"),
        ('{"version": 1, "finger', "not JSON"),
        ("[]", "damaged"),
        ("{}", "fingerprint: Field required"),
        (json.dumps({"version": PROFILE_VERSION + 1, "new": True}), f"version {PROFILE_VERSION + 1}"),
    ],
    ids=["empty", "cut off", "a list", "without figures", "a newer version"],
)
def test_a_file_that_cannot_be_used_is_named_with_what_to_do(content, message, tmp_path):
    facts = machine_facts()
    path = profile_path(tmp_path, facts)
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load_profile(tmp_path, facts)
    assert caught.value.place == str(path)
    assert caught.value.remedy is not None and "lohan profile --again" in caught.value.remedy


@pytest.mark.parametrize("value", [-1.0, 0.0, "fast", None], ids=str)
def test_a_figure_that_can_be_none_is_damage(value, tmp_path):
    facts = machine_facts()
    path = save_profile(tmp_path, machine_profile(facts))
    content = json.loads(path.read_text())
    content["host_memory"]["value"] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"damaged: host_memory\.value"):
        load_profile(tmp_path, facts)


def test_bytes_that_are_no_text_are_damage(tmp_path):
    facts = machine_facts()
    profile_path(tmp_path, facts).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_profile(tmp_path, facts)


# ---------------------------------------------------------------- drives that fail


def _fail(number: int):
    def call(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize("call", ["os.fsync", "pathlib.Path.rename"])
def test_a_full_drive_leaves_the_earlier_profile_and_no_other_file(call, tmp_path, monkeypatch):
    facts = machine_facts()
    earlier = machine_profile(facts)
    path = save_profile(tmp_path, earlier)
    monkeypatch.setattr(call, _fail(errno.ENOSPC))
    with pytest.raises(StorageError, match="No space left") as caught:
        save_profile(tmp_path, machine_profile(facts, host_memory=figure(1e9)))
    monkeypatch.undo()
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.place == str(path)
    assert load_profile(tmp_path, facts) == earlier
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be kept") as caught:
        save_profile(tmp_path / "file" / "profiles", machine_profile(machine_facts()))
    assert str(tmp_path / "file") in str(caught.value.place)


def test_the_file_is_synced_before_it_has_its_name_and_the_folder_after(tmp_path, monkeypatch):
    calls: list[str] = []
    sync, rename = os.fsync, Path.rename

    def fsync(descriptor: int) -> None:
        calls.append(f"sync {Path(f'/proc/self/fd/{descriptor}').resolve().name}")
        sync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        calls.append(f"rename to {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", renamed)
    facts = machine_facts()
    save_profile(tmp_path, machine_profile(facts))
    name = f"{facts.digest}.json"
    assert [calls[0].startswith(f"sync .{name}."), *calls[1:]] == [True, f"rename to {name}", f"sync {tmp_path.name}"]


# ---------------------------------------------------------------- blocks


def test_blocks_of_several_models_and_shapes_accumulate():
    profile = machine_profile(machine_facts(), blocks=())
    first, second = block_times(rows=1), block_times(rows=4)
    others = [block_times(workload_digest="another"), block_times(kernels="fused"), block_times(precision="fp32")]
    others.append(block_times(sequence_length=64))
    profile = with_blocks(with_blocks(profile, [first]), [second, *others])
    assert profile.blocks == (first, second, *others)


def test_a_new_measurement_takes_the_place_of_its_own_earlier_one():
    first, second = block_times(rows=1), block_times(rows=4)
    profile = with_blocks(machine_profile(machine_facts(), blocks=()), [first, second])
    newer = block_times(rows=1, forward_seconds=figure(0.5))
    assert with_blocks(profile, [newer]).blocks == (newer, second)


def test_a_block_is_found_by_everything_it_depends_on():
    block = block_times()
    profile = machine_profile(machine_facts(), blocks=(block,))
    wanted = {"workload_digest": "a model", "kernels": "torch", "precision": "bf16", "rows": 2, "sequence_length": 128}
    assert find_block(profile, **wanted) == block
    for change in ({"workload_digest": "x"}, {"kernels": "x"}, {"precision": "fp32"}, {"rows": 3}, {"sequence_length": 64}):
        assert find_block(profile, **{**wanted, **change}) is None


# ---------------------------------------------------------------- named machines


@pytest.mark.parametrize("name", sorted(NAMED_MACHINES))
def test_named_machines_are_whole_and_never_this_one(name):
    machine = NAMED_MACHINES[name]
    assert machine.name == name
    assert machine.profile.fingerprint == machine.facts.digest != probe().digest
    assert machine.profile.device == machine.facts.gpus[0].name
    assert {update.form for update in machine.profile.updates} == set(StateForm)
    missing = [field for field, value in machine.profile if value is None]
    assert missing == ["commit_seconds"]
    assert machine.profile.blocks == ()
    assert HardwareProfile.model_validate_json(machine.profile.model_dump_json()) == machine.profile


def test_named_machines_differ_in_their_gpu_alone():
    digests = {machine.facts.digest for machine in NAMED_MACHINES.values()}
    assert len(digests) == len(NAMED_MACHINES)
    assert len({machine.facts.model_copy(update={"gpus": ()}).digest for machine in NAMED_MACHINES.values()}) == 1
