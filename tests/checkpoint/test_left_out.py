"""An attached engine saves all that can be saved, and says early and once what it leaves out."""

from __future__ import annotations

import os
import re
import warnings
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import zckpt
from tests.support.models import make_engine, train
from tests.support.runs import AFTER, BEFORE, assert_same, everything, inner, tensors_of
from zckpt.adapters.deepspeed import refuse
from zckpt.checkpoint.writing.collect import Changes, pack_tree
from zckpt.engines.tensors import holdings
from zckpt.format import names, tree

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.cluster import Cluster


class Level(Enum):
    HIGH = 3


class Scheduler(torch.optim.lr_scheduler.LambdaLR):
    """A scheduler whose state has what no checkpoint can hold."""

    def __init__(self, optimizer: Any) -> None:
        self.curve = partial(pow, 0.5)
        self.stages = {"warmup": [1, torch.nn.ReLU], "steps": [1, 2]}
        super().__init__(optimizer, self.curve)


class Stateful:
    """A registered object, such as a data loader."""

    def __init__(self) -> None:
        self.state: Any = {"position": 5, "fetch": print}

    def state_dict(self) -> Any:
        return dict(self.state)

    def load_state_dict(self, state: Any) -> None:
        self.state |= state


class Odd(torch.optim.AdamW):
    """An optimizer whose state has an object, and moments whose names cannot be those of files."""

    def step(self, closure: Any = None) -> Any:
        returned = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["hook"] = print
                    for key in (7, "sum/of gradients"):
                        self.state[p].setdefault(key, torch.zeros_like(p)).add_(p.grad)
        return returned


def odd_engine(seed: int = 0) -> Any:
    engine = make_engine(stage=2, optimizer="odd", scheduler=Scheduler, seed=seed)
    for group in inner(engine).param_groups:
        group["transform"] = len
    return engine


def said(action: Callable[[], Any]) -> list[str]:
    """Returns the warnings of zckpt that an action gives."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        action()
    texts = [str(warning.message) for warning in warned]
    return [text for text in texts if "cannot be kept" in text or "plain form" in text or "`latest`" in text]


def save_what_can_be_saved(directory: str) -> None:
    from tests.support import models

    models.OPTIMIZERS["odd"] = partial(Odd, lr=1e-2)
    rank = torch.distributed.get_rank()
    engine, loader = odd_engine(), Stateful()
    at_once = said(lambda: zckpt.attach(engine))
    zckpt.register(engine, "train", loader)
    after_steps = [said(partial(train, engine, 1, step)) for step in range(BEFORE)]
    args = {"lr": 1.0, "callbacks": [1, print], "model": {"kind": torch.nn.ReLU, "level": Level.HIGH}, (0, 1): 2}
    saves = [said(lambda: engine.save_checkpoint(directory, client_state={"args": args})) for _ in range(2)]
    said_later = said(lambda: engine.save_checkpoint(directory, client_state={"args": args, "late": [print]}))
    if rank == 0:
        (text,) = at_once
        assert "engine.scheduler.state.stages.warmup, since engine.scheduler.state.stages.warmup[1]: type" in text
        assert "engine.optimizer.param_groups[0].transform: builtin_function_or_method cannot be kept" in text
        (text,), *others = after_steps
        assert "optimizer.states[0].values.hook: builtin_function_or_method" in text
        assert "client_rank_state.train.fetch: builtin_function_or_method" in text
        assert "transform" not in text, "this was said before"
        assert others == [[]] * (BEFORE - 1)
        replaced, left_out = saves[0]
        assert "client_state.args.model.level (Level) as int" in replaced
        assert "the key (0, 1) of client_state.args as '(0, 1)'" in replaced
        assert "client_state.args.callbacks, since client_state.args.callbacks[1]: builtin" in left_out
        assert "client_state.args.model.kind: type" in left_out
        assert "fetch" not in left_out, "this was said before, though rank 1 has it too"
        assert saves[1] == []
        assert said_later == [left_out.partition(": ")[0] + ": client_state.late, since client_state.late[0]: "
                              "builtin_function_or_method cannot be kept"]  # fmt: skip
    else:
        assert [*at_once, *after_steps, *saves, *said_later] == [[]] * (BEFORE + 2)

    resumed, other = odd_engine(seed=1), Stateful()
    other.state = {}
    said(lambda: zckpt.attach(resumed))
    zckpt.register(resumed, "train", other)
    path, client_state = resumed.load_checkpoint(directory)
    assert client_state == {"args": {"lr": 1.0, "model": {"level": 3}, "(0, 1)": 2}}
    assert other.state == {"position": 5}
    assert zckpt.validate(path).ok
    assert_same(tensors_of(resumed), tensors_of(engine))
    states = [{k: v for k, v in state.items() if k != "hook"} for state in inner(resumed).state.values()]
    for state, live in zip(states, inner(engine).state.values(), strict=True):
        assert_same(
            {str(key): torch.as_tensor(value) for key, value in state.items()},
            {str(key): torch.as_tensor(value) for key, value in live.items() if key != "hook"},
        )
    assert resumed.lr_scheduler.stages == engine.lr_scheduler.stages
    assert train(engine, AFTER, BEFORE) == train(resumed, AFTER, BEFORE)


def test_what_cannot_be_kept_is_left_out_and_said_once(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(save_what_can_be_saved, 2, str(tmp_path))


def write_itself_refuses(directory: str) -> None:
    from tests.support import models

    models.OPTIMIZERS["odd"] = partial(Odd, lr=1e-2)
    engine = odd_engine()
    with pytest.raises(zckpt.StateError, match=r"engine.optimizer.param_groups\[0\].transform"):
        zckpt.write(engine, f"{directory}/c")
    assert os.listdir(directory) == []


def test_write_refuses_what_cannot_be_kept(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(write_itself_refuses, 1, str(tmp_path))


def save_under_any_tag(directory: str) -> None:
    run = f"{directory}/run"
    engine, other = zckpt.attach(make_engine()), zckpt.attach(make_engine(seed=1))
    train(engine, 1)
    engine.save_checkpoint(run, "first")
    rank = torch.distributed.get_rank()
    for tag in ("../best", f"{directory}/absolute", "two\nlines"):
        train(engine, 1)
        texts = said(partial(engine.save_checkpoint, run, tag))
        assert len(texts) == (rank == 0)
        assert all("the checkpoint is saved, but `latest` does not name it" in text for text in texts)
        assert Path(run, "latest").read_text() == "first\n"
        other.load_checkpoint(run, tag)
        assert everything(other) == everything(engine)
    with pytest.raises((ValueError, zckpt.RankError), match="place of the file `latest`"):
        engine.save_checkpoint(run, "latest/x")
    there = sorted(path.name for path in Path(directory).rglob("*"))
    for tag in ("", ".", "..", "first/..", "../..", "/"):
        with pytest.raises((ValueError, zckpt.RankError), match=f"the tag {re.escape(repr(tag))} names .*choose a tag"):
            engine.save_checkpoint(f"{directory}/new", tag, save_latest=False)
    torch.distributed.barrier()
    assert there == sorted(path.name for path in Path(directory).rglob("*"))
    inner(engine).param_groups[0]["scale"] = rank  # as an optimizer computes it from its own partition
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        engine.save_checkpoint(run, "second")
    texts = [str(warning.message) for warning in warned if "on rank 1" in str(warning.message)]
    assert len(texts) == (rank == 0)
    assert all(
        "param_groups[0].scale is 0 on rank 0, 1 on rank 1: the checkpoint has that of" in text for text in texts
    )
    other.load_checkpoint(run)
    assert inner(other).param_groups[0]["scale"] == 0
    with pytest.raises(zckpt.StateError, match=r"scale .*0 on rank 0.*1 on rank 1"):
        zckpt.write(engine, f"{directory}/written")


def test_any_tag_is_saved(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(save_under_any_tag, 2, str(tmp_path))


def leave_unsupported_engines(directory: str) -> None:
    selection = {"topk_ratio": 0.25, "select_strategy": "step", "select_interval": 4, "update_interval": 2}
    zenflow = {**selection, "overlap_step": False, "full_warm_up_rounds": 1}
    setup: dict[str, Any] = {"stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": zenflow}
    engine = make_engine(**setup)
    with pytest.raises(zckpt.UnsupportedError, match=r"zero_optimization\.zenflow"):
        zckpt.attach(engine)
    attached: list[Any] = []
    zckpt.attach_all(on_attach=attached.append)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        engine = make_engine(**setup)
    texts = [str(warning.message) for warning in warned if "DeepSpeed itself saves and loads" in str(warning.message)]
    assert len(texts) == (engine.global_rank == 0)
    assert all("zero_optimization.zenflow" in text for text in texts)
    assert attached == []
    train(engine, 1)
    engine.save_checkpoint(f"{directory}/run")
    assert list(Path(directory, "run", "global_step1").glob("*_states.pt"))
    supported = make_engine()
    assert attached == [supported]


def test_an_engine_that_is_not_supported_is_told_when_it_is_attached(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(leave_unsupported_engines, 2, str(tmp_path))


def tell_after_the_first_step(directory: str) -> None:
    engine = zckpt.attach(make_engine(config={"gradient_accumulation_steps": 2}))
    calls = []

    def unsupported(engine: Any, adapter: object) -> list[str]:
        calls.append(engine.global_steps)
        return ["something new"]

    refuse.unsupported = unsupported
    train(engine, 1)
    assert calls == []
    with pytest.warns(UserWarning, match="save_checkpoint.*something new"):
        train(engine, 1, 1)
    train(engine, 2, 2)
    assert calls == [1]
    detached = make_engine()
    del calls[:]
    refuse.unsupported = lambda engine, adapter: []
    zckpt.detach(zckpt.attach(detached))
    refuse.unsupported = unsupported
    train(detached, 1)
    assert calls == []


def test_what_only_a_step_makes_is_told_after_the_first_step(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(tell_after_the_first_step, 1, str(tmp_path))


def refuse_a_dtype(directory: str) -> None:
    engine = make_engine(stage=1)
    engine.module.register_buffer("scales", torch.empty(2, dtype=torch.quint8))
    with pytest.raises(zckpt.UnsupportedError, match=r"scales.*torch.quint8"):
        zckpt.attach(engine)


def test_a_dtype_that_no_checkpoint_has_is_told_when_the_engine_is_attached(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(refuse_a_dtype, 1, str(tmp_path))


def sifted(value: Any) -> tuple[Any, Changes]:
    """Returns what a save keeps of ``client_state["value"]``, and what it changes."""
    changes = Changes()
    packed = pack_tree({names.CLIENT_STATE: {"value": value}}, "", [], 0, changes, leave_out=True)
    return tree.unpack(packed, lambda kind, name: None, "")[names.CLIENT_STATE].get("value", "nothing"), changes


def test_what_goes_with_a_list_is_not_named_twice() -> None:
    kept, changes = sifted([Level.HIGH, {"hook": print}, print])
    assert kept == "nothing"
    assert [*changes.left_out] == ["client_state.value"]
    assert changes.replaced == {}


def test_entries_whose_keys_cannot_be_kept_go_alone() -> None:
    keys: list[Any] = [object(), "\ud800", (1, 2), "(1, 2)"]
    kept, changes = sifted(dict.fromkeys(keys, 1))
    assert kept == {"(1, 2)": 1}
    assert len(changes.left_out) == 3


def test_the_time_for_many_keys_is_in_proportion_to_their_number() -> None:
    kept, changes = sifted({**{(key, key): 0 for key in range(20_000)}, "hook": print})
    assert len(kept) == 20_000
    assert [*changes.left_out] == ["client_state.value.hook"]


def test_what_contains_itself_is_left_out() -> None:
    around: list[Any] = [1]
    around.append(around)
    within: dict[str, Any] = {"kept": 2}
    within |= {"again": within, "more": {"deeper": [within]}}
    kept, changes = sifted({"list": around, "map": within})
    assert kept == {"map": {"kept": 2, "more": {}}}
    assert [*changes.left_out] == [
        "client_state.value.list",
        "client_state.value.map.again",
        "client_state.value.map.more.deeper",
    ]


def test_looking_at_a_state_leaves_iterators_and_arrays_alone() -> None:
    numbers, tensor = iter([1, 2]), torch.ones(2)
    tensors: list[Any] = [tensor]
    tensors.append(tensors)
    found = holdings("state", "s", {"numbers": numbers, "array": np.array(3), "tensors": tensors})
    assert [holding.data for holding in found] == [tensor]
    assert [*numbers] == [1, 2]


def save_two_engines_with_one_tag(directory: str) -> None:
    engines = [zckpt.attach(make_engine(seed=seed)) for seed in (0, 1)]
    first, second = engines
    first.save_checkpoint(directory, "mine")
    with pytest.warns(UserWarning, match="two engines"):
        second.save_checkpoint(directory, "other")
    with pytest.warns(UserWarning, match="replaces .*mine.*another engine"):
        second.save_checkpoint(directory, "mine")
    engines.clear()
    del first, second
    zckpt.attach(make_engine(seed=2)).save_checkpoint(directory, "mine")  # without a word


def test_a_save_says_that_it_replaces_what_another_engine_has_saved(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(save_two_engines_with_one_tag, 1, str(tmp_path))


class Strange(torch.optim.AdamW):
    """An optimizer whose state has tensors that no checkpoint can hold, and one whose elements share their memory."""

    def step(self, closure: Any = None) -> Any:
        returned = super().step(closure)
        for state in self.state.values():
            state.setdefault("wide", torch.ones(1).expand(4))
            state.setdefault("meta", torch.empty(2, device="meta"))
            state.setdefault("sparse", torch.eye(2).to_sparse())
        return returned


def save_and_load_strange_states(directory: str) -> None:
    from tests.support import models

    models.OPTIMIZERS["strange"] = partial(Strange, lr=1e-2)
    engine = zckpt.attach(make_engine(stage=2, optimizer="strange"))
    said(partial(train, engine, 1))
    engine.save_checkpoint(directory)
    before = tensors_of(engine)
    said(partial(train, engine, 1))
    engine.load_checkpoint(directory)
    assert_same(before, tensors_of(engine))
    assert all(state["meta"].is_meta and state["sparse"].is_sparse for state in inner(engine).state.values())


def test_an_engine_loads_what_it_has_saved_in_part(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(save_and_load_strange_states, 1, str(tmp_path))
