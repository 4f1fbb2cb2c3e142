"""A headless Chromium for the tests of the page, started once."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from grpocli_tools.report.page_data import PageData
from grpocli_tools.report.report_page import page_html

LONGEST_WAIT_S = 30


def wait_until(holds: Callable[[], Any]) -> None:
    """Waits until something holds; fails if it never does. A page may redraw an element while it is read."""
    from selenium.common.exceptions import StaleElementReferenceException

    end = time.monotonic() + LONGEST_WAIT_S
    while True:
        with suppress(StaleElementReferenceException):
            if holds():
                return
        assert time.monotonic() < end
        time.sleep(0.02)


OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1280,1000")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not (browser and driver):
        reason = "Chromium or chromedriver is missing; `make chromium` installs them"
        pytest.fail(reason) if os.environ.get("NEEDS_CHROMIUM") == "1" else pytest.skip(reason)
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = browser
    for option in OPTIONS:
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    window = Chrome(options=options, service=Service(driver))
    yield window
    window.quit()


@pytest.fixture
def show(chromium: Any, tmp_path: Path) -> Callable[..., Any]:
    """Opens a page of some data and returns the browser."""

    def opened(data: PageData, address: str = "", width: int = 1280, scheme: str = "light") -> Any:
        path = tmp_path / "page.html"
        path.write_text(page_html(data), encoding="utf-8")
        chromium.get("about:blank")
        chromium.get_log("browser")
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)  # windows have a minimum width
        chromium.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        )
        chromium.get(f"file://{path}{address}")
        return chromium

    return opened
