from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from trm_jax.report import METRICS, collect, render_html, write_report

Job = Callable[..., Path]
VOID = {"meta", "img", "link", "br", "hr", "input", "line"}


class _Page(HTMLParser):
    """Checks that tags nest, and gathers ids, links, attributes and the text a reader sees."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def _change(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_report_is_written_beside_the_runs_and_replaces_its_predecessor(job: Job):
    root = job()
    (root / "report.html").write_text("old")
    assert write_report(root) == root / "report.html"
    assert "Which mismatch hurts?" in (root / "report.html").read_text()
    assert sorted(path.name for path in root.iterdir()) == ["arms", "report.html", "run.json"]


def test_the_page_is_whole_and_asks_for_nothing_outside_itself(job: Job):
    html = render_html(collect(job(seeds=2)))
    page = _Page(html)
    names = [tag for tag, _ in page.tags]
    assert "script" not in names
    assert "link" not in names
    sources = [value for _, attrs in page.tags for key, value in attrs.items() if key in ("src", "href")]
    assert all(source.startswith(("#", "data:image/svg+xml;base64,")) for source in sources)
    assert not re.search(r"@import|url\(", html)
    ids = {attrs["id"] for _, attrs in page.tags if "id" in attrs}
    assert {source[1:] for source in sources if source.startswith("#")} <= ids


def test_it_can_be_read_by_a_screen_reader(job: Job):
    page = _Page(render_html(collect(job())))
    assert dict(page.tags)["html"]["lang"] == "en"
    images = [attrs for tag, attrs in page.tags if tag == "img"]
    assert len(images) == 11
    assert all(attrs["alt"] for attrs in images)
    accuracy = images[0]["alt"]
    assert accuracy.startswith("held-out accuracy over steps: zero mismatch from 25.0% to 84.0%; lag only")
    assert all("scope" in attrs for tag, attrs in page.tags if tag == "th")
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h\d", tag)]
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


def test_it_says_what_was_run_what_came_out_and_what_the_words_mean(job: Job):
    text = _Page(render_html(collect(job()))).text
    assert "trm-jax train quickstart.toml" in text
    assert "Begun 2026-11-29" in text
    assert "“mismatched, TRM” kept 90.0% of the sequences." in text
    assert "Lag alone lowered the final accuracy" in text
    assert "81.6–86.1%" in text  # Wilson's interval of 840 right of 1,000
    assert all(metric.meaning in text for metric in METRICS.values())
    assert "Not drawn: tokens kept: not recorded; prompts dropped: 0 in every arm at every step." in text
    assert "rollout.lag" in text
    assert "optim.rate" not in text.split("All settings of")[0]


def test_one_seed_is_said_and_so_are_several(job: Job):
    root = job()
    assert "Every arm rests on one complete seed" in _Page(render_html(collect(root))).text
    assert "bands run from" not in _Page(render_html(collect(root))).text


def test_several_seeds_need_no_warning(job: Job):
    text = _Page(render_html(collect(job(seeds=3)))).text
    assert "one complete seed" not in text
    assert "bands run from the smallest to the largest seed" in text
    assert "84.0% ± 1.0" in text


def test_incomplete_arms_are_announced_at_the_top(job: Job):
    root = job(seeds=2)
    _change(root / "arms" / "none" / "seed1" / "result.json", status="stopped", reason="time limit of 600 s")
    (root / "arms" / "cis" / "seed0" / "result.json").unlink()
    text = _Page(render_html(collect(root))).text
    top = text[: text.index("Did it learn?")]
    assert "“mismatched, uncorrected” is incomplete: seed 1 stopped at step 10 (time limit of 600 s)." in top
    assert "“mismatched, CIS” is incomplete: seed 0 unfinished at step 10." in top
    assert "mismatched, CIS, seed 0: result.json is missing" in top
    assert "“mismatched, uncorrected” and “mismatched, CIS” rest on one complete seed" in top


def test_names_and_reasons_are_escaped(job: Job):
    root = job(title="<script>alert(1)</script> & co")
    head = json.loads((root / "run.json").read_text())
    head["arms"][0]["name"] = '"><img src=x onerror=alert(1)>'
    (root / "run.json").write_text(json.dumps(head))
    _change(root / "arms" / "none" / "seed0" / "result.json", status="failed", reason="<b>NaN</b>")
    _change(root / "arms" / "none" / "seed0" / "config.json", note="</pre><script>")
    page = _Page(render_html(collect(root)))
    assert not {"script", "b"} & {tag for tag, _ in page.tags}
    assert all(attrs["src"].startswith("data:") for tag, attrs in page.tags if tag == "img")
    assert "<script>alert(1)</script> & co" in page.text
    assert '"><img src=x onerror=alert(1)>' in page.text


@pytest.mark.parametrize("content", ["{}", '{"arms": [{"slug": "zero"}]}', "rubbish"])
def test_a_job_that_has_hardly_begun_still_has_a_page(tmp_path: Path, content: str):
    (tmp_path / "run.json").write_text(content)
    page = _Page(write_report(tmp_path).read_text())
    assert "cannot be said" in page.text
    assert "img" not in [tag for tag, _ in page.tags]
