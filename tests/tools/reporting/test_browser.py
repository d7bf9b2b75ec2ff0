"""The page of zckpt.report works in a real browser, for checkpoints of a real run. ``make test-browser`` tests it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

import zckpt
from tests.support import reports
from tests.support.reports import browser, logged, opened, requests, write_run
from tests.support.states import write_state

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.skipif(reports.missing() is not None, reason=str(reports.missing())),
]
webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium, which `make test-browser` installs")

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from selenium.webdriver.chrome.webdriver import WebDriver

    from tests.support.cluster import Cluster

HOSTILE = [
    "</script><img src=x onerror=document.title='hacked'>",
    "<a href='javascript:alert(1)'>a</a>",
    "&lt;b&gt;",
    "a&<img src=x>",
]
ENTER, TAB = "\ue007", "\ue004"
"""The codes of two keys, as the driver of the browser takes them."""
PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def written(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("run")
    return list(cluster.run(write_run, 2, str(directory))[0])


@pytest.fixture(scope="module")
def page(written: list[str], tmp_path_factory: pytest.TempPathFactory) -> str:
    return zckpt.report(written, tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture(scope="module")
def driver() -> Iterator[WebDriver]:
    with browser() as driver:
        yield driver


@pytest.fixture(autouse=True)
def _quiet(driver: WebDriver) -> Iterator[None]:
    """Checks after each test that the page has logged no messages and has made no requests."""
    yield
    assert logged(driver) == []
    assert requests(driver) == []


def run(driver: WebDriver, script: str, *arguments: object) -> Any:
    return driver.execute_script(script, *arguments)


def texts(driver: WebDriver, selector: str) -> list[str]:
    return list(run(driver, "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", selector))


def choose(driver: WebDriver, selector: str, value: str) -> None:
    """Sets the value of a select or a check box, as users do."""
    script = "const [e, value] = [document.querySelector(arguments[0]), arguments[1]];"
    script += "e.type === 'checkbox' ? (e.checked = !!value) : (e.value = value); e.dispatchEvent(new Event('change'))"
    run(driver, script, selector, value)


def press(driver: WebDriver, *keys: str) -> None:
    webdriver.ActionChains(driver).send_keys(*keys).perform()


def wait(driver: WebDriver, condition: str, *arguments: object) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    WebDriverWait(driver, 60).until(lambda _: run(driver, f"return {condition}", *arguments))


def keys(driver: WebDriver) -> list[str]:
    return texts(driver, "#tensor-table tbody td.key")


def focused(driver: WebDriver) -> str:
    return str(run(driver, "const e = document.activeElement; return e.id || e.ariaLabel || e.textContent"))


def test_search_finds_tensors(driver: WebDriver, page: str, written: list[str]) -> None:
    opened(driver, page)
    all_keys = list(zckpt.open(written[-1]))
    assert len(keys(driver)) == 25
    assert f"of {len(all_keys)} entries" in texts(driver, ".dt-info")[0]
    search = driver.find_element("css selector", "#tensors .dt-search input")
    search.send_keys("layers.3 mlp")
    wait(driver, "document.querySelector('.dt-info').textContent.includes('filtered')")
    matching = [key for key in all_keys if "layers.3" in key and "mlp" in key]
    assert sorted(keys(driver)) == sorted(matching)
    assert len(matching) > 3
    choose(driver, "#part", "exp_avg")
    assert sorted(keys(driver)) == sorted(key for key in matching if key.startswith("exp_avg/"))
    search.clear()
    search.send_keys("nothing of the sort")
    wait(driver, "document.querySelector('#tensor-table .dt-empty')")


@pytest.mark.parametrize("heading", ["size", "norm", "mean", "update", "key"])
def test_sort_is_by_value(driver: WebDriver, page: str, written: list[str], heading: str) -> None:
    opened(driver, page)
    choose(driver, ".dt-length select", "100")
    wait(driver, "document.querySelectorAll('#tensor-table tbody tr').length > 25")
    number = texts(driver, "#tensor-table thead th").index(heading)
    checkpoint, before = zckpt.open(written[-1]), zckpt.open(written[-2])

    def value(key: str) -> Any:
        tensor, earlier = checkpoint.load(key)[key].double(), before.load(key)[key].double()
        return {
            "key": key,
            "size": tensor.numel() * checkpoint[key].item_bytes,
            "norm": float(tensor.norm()),
            "mean": float(tensor.mean()),
            "update": float((tensor - earlier).norm()),
        }[heading]

    for descending in (False, True):
        header = driver.find_elements("css selector", "#tensor-table thead th")[number]
        run(driver, "arguments[0].querySelector('[role=button]').focus()", header)
        press(driver, ENTER)
        wait(driver, "arguments[0].ariaSort === arguments[1]", header, "descending" if descending else "ascending")
        shown = [value(key) for key in keys(driver)]
        in_order = sorted(shown, reverse=descending)
        assert shown == (in_order if heading == "key" else pytest.approx(in_order, rel=1e-5))


def test_the_details_of_a_tensor_can_be_opened_and_closed(driver: WebDriver, page: str, written: list[str]) -> None:
    opened(driver, page)
    (key,) = [key for key in keys(driver) if key.endswith("layers.0.mlp.up_proj.weight") and key.startswith("master")]
    button = driver.find_element("css selector", f"button[aria-label='details of {key}']")
    run(driver, "arguments[0].focus()", button)
    press(driver, " ")
    wait(driver, "document.querySelector('.details .js-plotly-plot .bars path')")
    assert button.get_attribute("aria-expanded") == "true"
    tensor = zckpt.open(written[-1]).load(key)[key]
    names, values = texts(driver, ".details dt"), texts(driver, ".details dd")
    details = dict(zip(names, values, strict=True))
    assert (details["key"], details["ranks"]) == (key, "0-1")
    assert float(details["norm"]) == pytest.approx(float(tensor.norm()), rel=1e-3)
    counts = texts(driver, ".details table td.number")
    assert sum(int(count.replace(",", "")) for count in counts) == tensor.numel()
    press(driver, " ")
    assert driver.find_elements("css selector", ".details") == []


def test_the_treemap_zooms_by_mouse_and_by_keyboard(driver: WebDriver, page: str) -> None:
    opened(driver, page)
    wait(driver, "document.querySelectorAll('#treemap g.slice').length > 5")
    slices = driver.find_elements("css selector", "#treemap g.slice")
    (exp_avg,) = [part for part in slices if part.text.split("\n")[0] == "exp_avg"]
    run(driver, "arguments[0].scrollIntoView({block: 'center'})", exp_avg)
    title = exp_avg.find_element("css selector", "text")
    webdriver.ActionChains(driver).move_to_element(title).click().perform()
    wait(driver, "document.querySelector('#way [aria-current]').textContent === 'exp_avg'")
    assert texts(driver, "#modules tbody td:first-child")[0] == "model"
    wait(driver, "![...document.querySelectorAll('#treemap g.slice')].some((e) => e.textContent.startsWith('master'))")

    first = driver.find_element("css selector", "#modules tbody button")
    run(driver, "arguments[0].focus()", first)
    press(driver, ENTER)
    wait(driver, "document.querySelector('#way [aria-current]').textContent === 'model'")
    assert focused(driver) == "model", "the focus stays for the keyboard"
    assert "model" in texts(driver, "#said")[0]
    run(driver, "document.querySelector('#way button').focus()")
    press(driver, ENTER)
    wait(driver, "[...document.querySelectorAll('#treemap g.slice')].some((e) => e.textContent.startsWith('master'))")
    assert {*texts(driver, "#modules tbody td:first-child")} == {"master", "exp_avg", "exp_avg_sq", "param"}


def brightness(driver: WebDriver, selector: str, name: str) -> float:
    """Returns the brightness of a color of an element, from 0 to 255."""
    color = run(driver, f"return getComputedStyle(document.querySelector(arguments[0])).{name}", selector)
    red, green, blue = map(float, re.findall(r"[\d.]+", color)[:3])
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("system", ["light", "dark"])
def test_the_theme_is_that_of_the_switch_or_else_of_the_system(driver: WebDriver, page: str, system: str) -> None:
    opened(driver, page, theme=system)
    for chosen in ("", "light", "dark", ""):
        choose(driver, "#theme", chosen)
        dark = (chosen or system) == "dark"
        assert (brightness(driver, "body", "backgroundColor") < 60) == dark
        for text in ("body", "a", "#tensor-table td.key", ".facts li", "#modules button"):
            assert (brightness(driver, text, "color") > 130) == dark, text
        assert (brightness(driver, "#layer-chart .xtick text", "fill") > 130) == dark
        assert (brightness(driver, "#treemap .slice text", "fill") > 130) == dark


@pytest.mark.parametrize("size", [PHONE, {"width": 1280, "height": 900}], ids=["phone", "desk"])
def test_nothing_is_wider_than_the_window(driver: WebDriver, page: str, size: dict[str, Any]) -> None:
    opened(driver, page, **size)
    run(driver, "document.querySelector('#tensor-table button.more').click()")
    run(driver, "document.querySelectorAll('details').forEach((e) => (e.open = true))")
    assert run(driver, "return document.documentElement.scrollWidth <= innerWidth")
    wait(driver, "document.querySelector('.details .bars path')")
    chart = run(driver, "return document.querySelector('.details .chart').getBoundingClientRect().right <= innerWidth")
    assert chart, "the histogram can be seen without scrolling"


def test_the_keyboard_reaches_everything_in_order(driver: WebDriver, page: str) -> None:
    opened(driver, page)
    run(driver, "document.activeElement.blur(); scrollTo(0, 0)")
    order, heights = [], []
    for _ in range(200):
        press(driver, TAB)
        order.append(focused(driver))
        heights.append(run(driver, "return document.activeElement.getBoundingClientRect().top + scrollY"))
        outline = run(driver, "return getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none" or order[-1] in ("", "INPUT"), order[-1]
        if order[-1] == "layer-filter":
            break
    assert order[0] == "Skip to the content"
    expected = ["theme", "Overview", "Modules and tensors", "part", "Table of tensors", "layer-part", "measure"]
    assert [element for element in order if element in expected] == expected
    assert sum(element.startswith("details of ") for element in order) == 25
    unnamed = "[...document.querySelectorAll('select, input')].filter((e) => !e.labels.length && !e.ariaLabel).length"
    assert run(driver, f"return {unnamed}") == 0


def test_the_page_shows_norms_and_updates_of_layers_over_the_steps(
    driver: WebDriver, page: str, written: list[str]
) -> None:
    opened(driver, page)
    checkpoints = [zckpt.open(path) for path in written]

    def weights(n: int, layer: str) -> torch.Tensor:
        tensors = checkpoints[n].load(f"master/{layer}.*")
        return torch.cat([tensor.flatten() for tensor in tensors.values()]).double()

    def table() -> dict[str, list[str]]:
        rows = "[...document.querySelectorAll('#layer-table tbody tr')]"
        cells = run(driver, f"return {rows}.map((row) => [...row.cells].map((cell) => cell.textContent))")
        return {name: values for name, *values in cells}

    assert len(table()) == 6
    assert len(driver.find_elements("css selector", "#layer-chart .scatterlayer .trace")) == 6
    norms = [float(weights(n, "model.layers.2").norm()) for n in range(len(written))]
    assert [float(cell) for cell in table()["model.layers.2"]] == pytest.approx(norms, rel=1e-3)
    choose(driver, "#measure", "relative")
    moved = [
        float((weights(n, "model.layers.2") - weights(n - 1, "model.layers.2")).norm()) / norms[n - 1]
        for n in range(1, len(written))
    ]
    first, *others = table()["model.layers.2"]
    assert first == "\N{EN DASH}"
    assert [float(cell) for cell in others] == pytest.approx(moved, rel=6e-3)
    driver.find_element("id", "layer-filter").send_keys("LAYERS.1")
    assert list(table()) == ["model.layers.1"]
    choose(driver, "#log", "on")
    assert len(driver.find_elements("css selector", "#layer-chart .scatterlayer .trace")) == 1


def test_hostile_names_do_nothing(driver: WebDriver, tmp_path: Path) -> None:
    tensors = {f"{name}.{n}.w": torch.ones(40) for n, name in enumerate(HOSTILE)}
    paths = [write_state(tmp_path / str(n), 2, tensors, step=n, parts=("master",)).path for n in range(2)]
    opened(driver, zckpt.report(paths, tmp_path / "r.html"))
    run(driver, "document.querySelectorAll('#tensor-table button.more').forEach((e) => e.click())")
    run(driver, "document.querySelectorAll('details').forEach((e) => (e.open = true))")
    wait(driver, "document.querySelectorAll('.details .bars path').length >= 3")
    while buttons := driver.find_elements("css selector", "#modules button"):
        run(driver, "arguments[0].click()", buttons[0])
    assert "hacked" not in driver.title
    assert driver.find_elements("css selector", "img, a[href^=javascript]") == []
    assert sorted(keys(driver)) == sorted(f"master/{name}" for name in tensors)
    for text in ("&<img src", "&lt;"):  # the search takes these letters as they are
        box = driver.find_element("css selector", "#tensors .dt-search input")
        box.clear()
        box.send_keys(text)
        wait(driver, "document.querySelectorAll('#tensor-table td.key').length === 1")
        assert [text in key for key in keys(driver)] == [True]


def test_ten_thousand_tensors_can_be_searched(driver: WebDriver, tmp_path: Path) -> None:
    """``bench/report_page.py`` measures how fast the search is."""
    tensors = {f"model.layers.{n // 50}.module_{n % 50}.weight": torch.full((4,), float(n)) for n in range(10_000)}
    path = write_state(tmp_path / "c", 1, tensors, parts=("master",)).path
    opened(driver, zckpt.report(path, tmp_path / "r.html"))
    assert "of 10,000 entries" in texts(driver, ".dt-info")[0]
    driver.find_element("css selector", "#tensors .dt-search input").send_keys("layers.123 module_7.")
    wait(driver, "document.querySelectorAll('#tensor-table tbody tr').length === 1")
    assert keys(driver) == ["master/model.layers.123.module_7.weight"]
    for name in ("master", "model.layers", "123"):
        assert 0 < len(driver.find_elements("css selector", "#treemap g.slice")) <= 310
        buttons = driver.find_elements("css selector", "#modules button")
        run(driver, "arguments[0].click()", next(button for button in buttons if button.text == name))
    assert "module_7.weight" in texts(driver, "#modules tbody td:first-child")
