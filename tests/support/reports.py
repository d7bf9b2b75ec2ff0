"""A run of real engines, its report page, and a browser that opens the page.

This command makes the pictures of docs/report.md:

    torchrun --nproc-per-node 2 -m tests.support.reports
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from selenium.webdriver.chrome.webdriver import WebDriver

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
STEPS = (2, 4, 6, 8)


def write_run(directory: str, layers: int = 4, steps: tuple[int, ...] = STEPS) -> list[str]:
    """Trains a tiny Llama at stage 3, and writes a checkpoint at each of ``steps``.

    The embeddings are frozen, and the learning rate changes. Every rank calls this. Returns the paths of the
    checkpoints.
    """
    import deepspeed
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import zckpt

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers, max_position_embeddings=64))
    model.model.embed_tokens.requires_grad_(False)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
        config={
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 10}},
        },
    )
    random = torch.Generator().manual_seed(engine.global_rank)
    paths = []
    for step in range(1, steps[-1] + 1):
        tokens = torch.randint(64, (2, 32), generator=random)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        with torch.no_grad():  # without no_grad, DeepSpeed 0.18 cannot step on torch 2.13 at stages 1 and 2
            engine.step()
        if step in steps:
            paths.append(zckpt.write(engine, f"{directory}/global_step{step}", client_state={"tokens": step * 64}))
    return paths


def missing() -> str | None:
    """Returns a message on what has to be installed to open a page, or None if all is there."""
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        return "needs a browser and its driver: Debian's chromium and chromium-driver"
    return None


@contextmanager
def browser(width: int = 1280, height: int = 900) -> Iterator[WebDriver]:
    """Yields a headless Chromium that finds no host, and that records the logs and the requests of its pages."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory() as home:
        options = ChromeOptions()
        options.binary_location = str(shutil.which("chromium"))
        for argument in (
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
            "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={home}", f"--window-size={width},{height}",
            "--force-prefers-reduced-motion",
        ):  # fmt: skip
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        service = Service(shutil.which("chromedriver"), env={**os.environ, "SE_OFFLINE": "true", "HOME": home})
        driver = Chrome(options, service)
        try:
            yield driver
        finally:
            driver.quit()


def opened(driver: WebDriver, page: str, *, width: int = 1280, height: int = 900, theme: str = "light") -> None:
    """Opens a page in a window of this size on a system of this theme, and waits until it is ready."""
    from selenium.webdriver.support.wait import WebDriverWait

    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    )
    driver.get(Path(page).absolute().as_uri())
    WebDriverWait(driver, 120).until(lambda _: driver.execute_script("return document.documentElement.dataset.ready"))


def requests(driver: WebDriver) -> list[str]:
    """Returns the addresses that pages have requested since the last call, except for their own file and data in it."""
    import json

    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    urls = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    return [url for url in urls if not url.startswith(("file:", "data:", "blob:", "chrome:"))]


def logged(driver: WebDriver) -> list[Any]:
    """Returns the messages in the browser's console since the last call."""
    return [entry["message"] for entry in driver.get_log("browser")]


def take(driver: WebDriver, name: str) -> None:
    """Writes a picture of the window."""
    import base64

    picture = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "webp", "quality": 85})
    (PICTURES / f"report-{name}.webp").write_bytes(base64.b64decode(picture["data"]))


def take_all(page: str) -> None:
    """Makes the pictures of docs/report.md. Each shows a section of the page after an action of the user there."""
    import time

    desk, phone = {"width": 1200, "height": 820}, {"width": 390, "height": 780}
    measure = "const e = document.getElementById('measure'); e.value = 'relative'; e.onchange()"
    log = "const log = document.getElementById('log'); log.checked = true; log.onchange()"
    open_row = "document.querySelectorAll('#tensor-table button.more')[3].click()"
    zoom = "['master', 'model', 'layers', '3'].forEach((name) => [...document.querySelectorAll('#modules button')]"
    zoom += ".find((e) => e.textContent === name)?.click())"
    with browser() as driver:
        for name, size, theme, section, action in (
            ("overview", desk, "light", "overview", ""),
            ("treemap", desk, "light", "bytes", ""),
            ("zoomed", desk, "dark", "bytes", zoom),
            ("tensors", desk, "light", "tensors", open_row),
            ("layers", {**desk, "height": 680}, "dark", "layers", f"{measure}; {log}"),
            ("phone", phone, "dark", "bytes", ""),
        ):
            opened(driver, page, **size, theme=theme)
            driver.execute_script(action)
            driver.execute_script(f"document.getElementById('{section}').scrollIntoView()")
            if section == "overview":
                driver.execute_script("scrollTo(0, 0)")
            time.sleep(3)  # until all animations have ended
            take(driver, name)
        assert logged(driver) == requests(driver) == []


def main() -> None:
    import deepspeed
    import torch.distributed as dist

    import zckpt

    deepspeed.init_distributed("gloo")
    shared = [tempfile.mkdtemp()]
    dist.broadcast_object_list(shared)
    os.chdir(shared[0])
    steps = (10, 20, 30, 40, 50, 60)
    write_run("checkpoints", layers=12, steps=steps)
    page = zckpt.report([f"checkpoints/global_step{step}" for step in steps])
    if dist.get_rank() == 0:
        take_all(page)
        shutil.rmtree(shared[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
