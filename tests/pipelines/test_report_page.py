"""The page that someone opens in the morning: whole in itself, and right."""

from __future__ import annotations

import random
from html.parser import HTMLParser
from pathlib import Path

from pipelines.driver import StopRequest
from pipelines.manifest import OutputFolder, claim_run
from pipelines.report import RunRecord
from tests.small_jobs import make_plan, random_prompts, start_run, write_prompts

VOID = {"meta", "line", "rect", "polygon", "polyline"}


class Page(HTMLParser):
    """Tags, text, and what the page would load; tags that are not closed in order fail."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.classes: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._open.append(tag)
        for name, value in attrs:
            assert name not in ("src", "href", "xlink:href"), (tag, name, value)
            if name == "class":
                self.classes.append(value or "")
        if tag == "meta":
            self._open.pop()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_is_whole_in_itself_and_says_what_happened(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "a <b> & c")
    write_prompts(tmp_path / "in.parquet", [*random_prompts(random.Random(1), 30), None, []])
    plan = make_plan(tmp_path / "in.parquet")
    driver, _ = start_run(folder, plan)
    driver.request_stop(StopRequest.NOW)
    driver.run()
    assert "stopped" in Page(folder.page_file.read_text()).texts
    RunRecord(run=claim_run(folder)).save(folder)  # a run that was killed
    start_run(folder, plan)[0].run()
    text = folder.page_file.read_text()
    page = Page(text)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert "http" not in text
    assert "@import" not in text
    assert "url(" not in text
    assert page.tags.count("svg") == 9
    for expected in (
        "a <b> & c",
        "finished",
        "null_prompt",
        "killed",
        "empty_prompt",
        "committed",
        "Prompt lengths, tokens",
    ):
        assert expected in page.texts
    assert any("rows read 32 = ok 30 + error 2 + in flight 0" in one for one in page.texts)
    assert "line c0" in page.classes


def test_a_job_that_never_got_a_row_has_a_page(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "out")
    write_prompts(tmp_path / "in.parquet", [])
    start_run(folder, make_plan(tmp_path / "in.parquet"))[0].run()
    assert "finished" in Page(folder.page_file.read_text()).texts
