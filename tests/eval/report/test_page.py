"""The pages of runs in a browser: nothing is asked for, nothing fails, nothing overflows or overlaps, on paper neither.

Of report.html, and of the page of `python -m eval.compare`, whose tables may be wider than the screen, and scroll.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.report import CONFIG, records, write_run
from playwright.sync_api import Browser, Page, sync_playwright

from dyad.eval.compare.main import main as compare
from dyad.eval.report.main import write_report

pytestmark = pytest.mark.chromium
VIEWS = {"desktop": (1280, "screen"), "phone": (390, "screen"), "paper": (720, "print")}
# Lines of text as they lie on the page: of HTML by line, of SVG where it is not turned. Two that share more than a
# sliver overlap, and none may stick out of its box. Cards, tables, figures and the like must not overlap either, unless
# one holds the other.
LOOK = """() => {
  const found = [], width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width) found.push(`wider than ${width}`);
  for (const image of document.images)
    if (!image.complete || !image.naturalWidth) found.push(`no image: ${image.alt}`);
  const lines = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, parent = node.parentElement;
    const shown = parent.checkVisibility({contentVisibilityAuto: true}) && !parent.closest('.hidden');
    if (!node.data.trim() || !shown) continue;
    const turn = parent.getAttribute('transform') || '';
    if (parent.closest('svg') && /rotate\\((?!-?0 )/.test(turn)) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects())
      if (box.width > 1 && box.height > 1) lines.push([box, node.data.trim().slice(0, 30), parent]);
  }
  const shared = (a, b) => [Math.min(a.right, b.right) - Math.max(a.left, b.left),
                            Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top)];
  for (const [box, text, parent] of lines) {
    const around = parent.closest('.case, .card, .table, figure, .panel, .fold, body').getBoundingClientRect();
    const scrolls = parent.closest('.of-runs');
    if (!scrolls && (box.right > around.right + 1 || box.left < around.left - 1)) found.push(`out of its box: ${text}`);
  }
  lines.sort((a, b) => a[0].top - b[0].top);
  for (let i = 0; i < lines.length; i++)
    for (let j = i + 1; j < lines.length && lines[j][0].top < lines[i][0].bottom; j++) {
      const [across, down] = shared(lines[i][0], lines[j][0]);
      if (across > 2 && down > 0.4 * Math.min(lines[i][0].height, lines[j][0].height))
        found.push(`overlap: ${lines[i][1]} | ${lines[j][1]}`);
    }
  const blocks = [...document.querySelectorAll('.block, .card, .case, figure, .table, .panel, .sign, h1, h2, h3, h4')]
    .filter(block => block.checkVisibility());
  for (let i = 0; i < blocks.length; i++)
    for (let j = i + 1; j < blocks.length; j++) {
      const [across, down] = shared(blocks[i].getBoundingClientRect(), blocks[j].getBoundingClientRect());
      if (across > 2 && down > 2 && !blocks[i].contains(blocks[j]) && !blocks[j].contains(blocks[i]))
        found.push(`blocks overlap: ${blocks[i].className || blocks[i].tagName} | ${blocks[j].className}`);
    }
  return [found, lines.length];
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(write_run(tmp_path_factory.mktemp("page") / "run", log="going on at step 110 from x\n"))


def problems(browser: Browser, path: Path, view: str) -> list[str]:
    """What is wrong with a page as it looks in one of VIEWS; nothing may come from anywhere but the file."""
    width, media = VIEWS[view]
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.emulate_media(media="print" if media == "print" else "screen")
    told = _listening(page, path)
    page.goto(path.as_uri())
    found, lines = page.evaluate(LOOK)
    page.evaluate("document.querySelectorAll('details').forEach(part => { part.open = true; })")
    found += [problem for problem in page.evaluate(LOOK)[0] if problem not in found]
    page.close()
    assert lines > 100  # of text: an empty page has no overlap either
    return [*told, *found]


def _listening(page: Page, path: Path) -> list[str]:
    """Messages of the page and what it asks for, as they come."""
    told: list[str] = []
    page.on("console", lambda message: told.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: told.append(f"error: {error}"))
    allowed = (path.as_uri(), "data:")
    page.on("request", lambda r: None if r.url.startswith(allowed) else told.append(f"request: {r.url}"))
    return told


@pytest.mark.parametrize("view", VIEWS)
def test_the_page_is_whole(browser: Browser, report: Path, view: str) -> None:
    assert problems(browser, report, view) == []


@pytest.mark.parametrize("view", VIEWS)
def test_a_comparison_is_whole(browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, view: str) -> None:
    keys = ({"optim": {**CONFIG["optim"], "lr": 10.0**-n}, "seed": n % 2} for n in range(8))
    runs = [write_run(tmp_path / f"{n}", records(loss=2.0 + n), config={**CONFIG, **of}) for n, of in enumerate(keys)]
    (runs[0] / "report.html").touch()
    monkeypatch.setattr("sys.argv", ["eval.compare", *map(str, runs), f"page={tmp_path / 'runs.html'}"])
    compare()
    assert problems(browser, tmp_path / "runs.html", view) == []


def test_what_a_run_without_evaluation_has_is_whole_too(browser: Browser, tmp_path: Path) -> None:
    path = write_report(write_run(tmp_path / ("long-name-" * 12), results=[]))
    assert problems(browser, path, "phone") == []


def test_a_phone_swipes_what_stands_side_by_side(browser: Browser, report: Path) -> None:
    """The page is about as long as on a desk, the last box of a row can be reached, and a tap enlarges a picture."""
    page = browser.new_page(viewport={"width": 1280, "height": 900}, has_touch=True)
    page.goto(report.as_uri())
    height = page.evaluate("document.documentElement.scrollHeight")
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollHeight") < 1.1 * height
    rows = page.evaluate(
        """[...document.querySelectorAll('.charts, .numbers, .gallery')].filter(r => r.checkVisibility()).map(row => {
             row.scrollLeft = row.scrollWidth;
             const boxes = [...row.children];
             return [boxes.length, Math.max(...boxes.map(box => box.getBoundingClientRect().right))];
           })"""
    )
    assert max(boxes for boxes, _ in rows) > 10 and all(right <= 390 for _, right in rows)
    picture = page.locator(".tiles img").first
    picture.tap()
    assert picture.evaluate("box => box.getBoundingClientRect().width") > 300
    page.close()


TAMPERED = {
    "request": ("</footer>", '<img src="https://example.org/x.png" alt="x"></footer>'),
    "console": ("</footer>", "<script>console.log(1)</script></footer>"),
    "no image": ("data:image/webp;base64,UklGR", "data:image/webp;base64,AAAAA"),
    "wider": ("</footer>", '<div style="width: 3000px">wide</div></footer>'),
    "out of its box": ('class="asked"', 'class="asked" style="width: 900px"'),
    "overlap": ('class="lead"', 'class="lead" style="margin-bottom: -3em; line-height: .4"'),
    "blocks overlap": ('id="what"', 'id="what" style="margin-right: -80px"'),
}


@pytest.mark.parametrize("problem", TAMPERED)
def test_a_page_that_is_not_whole_is_told(browser: Browser, report: Path, tmp_path: Path, problem: str) -> None:
    page = report.read_text()
    old, new = TAMPERED[problem]
    assert old in page
    allowed = (
        page.replace("default-src 'none'; img-src data:", "img-src data: https:") if problem == "request" else page
    )
    (tmp_path / "page.html").write_text(allowed.replace(old, new))
    assert [p for p in problems(browser, tmp_path / "page.html", "desktop") if p.startswith(problem)]


def test_the_policy_of_the_page_keeps_scripts_and_addresses_out(browser: Browser, report: Path, tmp_path: Path) -> None:
    """Were anything of the data to get through, it could do nothing."""
    path = tmp_path / "page.html"
    bad = '<img src="https://example.org/x.png"><script>document.title = "taken"</script></footer>'
    path.write_text(report.read_text().replace("</footer>", bad))
    page = browser.new_page()
    told = _listening(page, path)
    page.goto(path.as_uri())
    assert page.title() == "run"
    assert len([t for t in told if "Content Security Policy" in t]) == 2
    page.close()
