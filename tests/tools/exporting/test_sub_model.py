"""zckpt.export writes one module of the model that was trained, under the names that the module has alone."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import deepspeed
import pytest
import torch
from safetensors.torch import load_file

import zckpt
from tests.support import lora
from tests.support.hugging_face import content, make_hugging_face
from zckpt.cli import main

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster


class Agent(torch.nn.Module):
    """A policy with tied weights, and a critic, one of whose weights is tied to one of the policy."""

    def __init__(self) -> None:
        super().__init__()
        self.critic, self.policy = torch.nn.Linear(32, 64), make_hugging_face("gpt2")
        self.critic.weight = self.policy.transformer.wte.weight
        self.critic.register_buffer("seen", torch.arange(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        output = self.policy(tokens, labels=tokens, output_hidden_states=True)
        loss: torch.Tensor = output.loss + self.critic(output.hidden_states[-1]).square().mean()
        return loss


LEFT_OUT = {"critic.bias", "critic.seen"}


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    """Returns a model, whose checkpoint is ``ckpt``, and whose policy is saved in the folder ``policy``."""
    torch.manual_seed(0)
    made = Agent()
    lora.write_model(tmp_path / "ckpt", made)
    made.policy.save_pretrained(tmp_path / "policy")
    return made


@pytest.mark.parametrize("prefix", ["policy.", "policy"])
def test_a_module_becomes_what_its_save_pretrained_writes(tmp_path: Path, agent: Agent, prefix: str) -> None:
    options: dict[str, Any] = {"config": tmp_path / "policy", "strip_prefix": prefix}
    exported = zckpt.export(tmp_path / "ckpt", tmp_path / "out", **options)
    assert content(tmp_path / "out") == content(tmp_path / "policy")
    assert {*exported.left_out} == LEFT_OUT
    assert "left out: 2 tensors: critic." in str(exported)

    zckpt.export(tmp_path / "ckpt", tmp_path / "out.pt", format="pt", strip_prefix=prefix)
    state = torch.load(tmp_path / "out.pt", weights_only=True)
    expected = agent.policy.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()

    zckpt.export(tmp_path / "ckpt", tmp_path / "plain", strip_prefix=prefix)  # under one name of each tied weight
    assert load_file(tmp_path / "plain" / "model.safetensors").keys() == expected.keys() - {"lm_head.weight"}
    zckpt.export(tmp_path / "ckpt", tmp_path / "critic", strip_prefix="critic")
    assert torch.equal(load_file(tmp_path / "critic" / "model.safetensors")["weight"], agent.critic.weight)


def test_the_hint_names_the_module_that_the_configuration_is_of(tmp_path: Path, agent: Agent) -> None:
    with pytest.raises(zckpt.MismatchError, match=r"strip_prefix='policy\.' \(--strip-prefix policy\.\)"):
        zckpt.export(tmp_path / "ckpt", tmp_path / "out", config=tmp_path / "policy")
    lora.write_model(tmp_path / "wrapped", torch.nn.ModuleDict({"module": agent}))
    with pytest.raises(zckpt.MismatchError, match=r"strip_prefix='module\.policy\.'"):
        zckpt.export(tmp_path / "wrapped", tmp_path / "out", config=tmp_path / "policy")
    config = json.loads((tmp_path / "policy" / "config.json").read_text())
    (tmp_path / "policy" / "config.json").write_text(json.dumps(config | {"n_layer": 12}))
    with pytest.raises(zckpt.MismatchError, match=r"strip_prefix='module\.'"):  # all names begin with it
        zckpt.export(tmp_path / "wrapped", tmp_path / "out", config=tmp_path / "policy")
    with pytest.raises(zckpt.MismatchError, match="or give none"):
        zckpt.export(tmp_path / "wrapped", tmp_path / "out", config=tmp_path / "policy", strip_prefix="module.policy")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("prefix", ["polcy.", "pol", "policy.transformer.wte.weight", ""])
def test_a_prefix_of_no_tensor_is_an_error(tmp_path: Path, agent: Agent, prefix: str) -> None:
    with pytest.raises(zckpt.KeyNotFoundError, match=r"begins with '.*\.'") as caught:
        zckpt.export(tmp_path / "ckpt", tmp_path / "out", strip_prefix=prefix)
    assert "the names begin with: critic., policy." in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_the_command_says_what_is_left_out(tmp_path: Path, agent: Agent, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["export", str(tmp_path / "ckpt"), str(tmp_path / "out"), "--strip-prefix", "policy."]
    assert main([*command, "--config", str(tmp_path / "policy")]) == 0
    assert "\n  left out: 2 tensors: critic." in capsys.readouterr().out
    assert content(tmp_path / "out") == content(tmp_path / "policy")
    assert main([*command, "--overwrite", "--json"]) == 0
    assert {*json.loads(capsys.readouterr().out)["left_out"]} == LEFT_OUT


@pytest.mark.filterwarnings("ignore")  # PEFT warns about what it saves
@pytest.mark.parametrize("form", ["adapter", "merge"])
def test_the_adapter_of_a_module_is_exported_or_merged(tmp_path: Path, form: str) -> None:
    torch.manual_seed(0)
    policy = lora.make_model("plain")
    lora.write_model(tmp_path / "ckpt", torch.nn.ModuleDict({"policy": policy, "critic": torch.nn.Linear(3, 4)}))
    policy.save_pretrained(str(tmp_path / "config"))
    merged = lora.make_model("plain").merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    shutil.copy(tmp_path / "merged" / "config.json", tmp_path / "config")
    options: dict[str, Any] = {form: "default", "config": tmp_path / "config", "strip_prefix": "policy."}
    exported = zckpt.export(tmp_path / "ckpt", tmp_path / "out", **options)
    weights, folder = ("adapter_model", "config") if form == "adapter" else ("model", "merged")
    name = f"{weights}.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / folder / name).read_bytes()
    assert {"critic.weight", "critic.bias"} <= {*exported.left_out}


def export_policy(directory: Path) -> list[str]:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }  # fmt: skip
    model = Agent()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.backward(engine(torch.arange(16).view(2, 8)))
    engine.step()
    zckpt.write(engine, directory / "ckpt", latest=False)
    return [*zckpt.export(engine, directory / "live", strip_prefix="policy.", max_shard_size="40KB").left_out]


def test_a_module_of_a_live_engine_is_exported_with_its_configuration(cluster: Cluster, tmp_path: Path) -> None:
    for left_out in cluster.run(export_policy, 2, tmp_path):
        assert {*left_out} == LEFT_OUT
    zckpt.export(
        tmp_path / "ckpt", tmp_path / "out", strip_prefix="policy.", config=tmp_path / "live", dtype="bf16",
        max_shard_size="40KB",
    )  # fmt: skip
    assert len(content(tmp_path / "live")) > 4
    assert content(tmp_path / "live") == content(tmp_path / "out")
    type(make_hugging_face("gpt2")).from_pretrained(tmp_path / "live")
