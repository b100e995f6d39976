"""What the site makes by itself: a page per method from its docstring, the commands, navigation.

MkDocs calls the functions whose names begin with ``on_``.
"""

from __future__ import annotations

import dataclasses
import html
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
import yaml
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from conduit_kv.cli.app import app
from conduit_kv.cli.methods import STAGES
from conduit_kv.methods import Method, registry
from conduit_kv.methods.catalogue import NAMES
from conduit_kv.methods.route.rules import RULES

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
GUIDES = (
    ("Measure and report", "bench.md"),
    ("The seven systems, measured", "measured.md"),
    ("Which plan: every figure", "usage.md"),
    ("Sessions and reuse", "sessions.md"),
    ("Serving", "serve.md"),
    ("lmms-eval", "lmms-eval.md"),
    ("The papers' tables", "papers.md"),
)
INSIDE = (
    ("Where things are", "structure.md"),
    ("Add a method", "add-a-method.md"),
    ("Add a model family", "families.md"),
    ("Keys and security", "security.md"),
    ("API", "api.md"),
    ("Commands", "commands.md"),
    ("Changes", "changes.md"),
)


DEPTHS = {
    24: "LLaVA-OneVision-0.5B, InternVL3-1B, SmolVLM-2.2B",
    28: "Qwen2-VL-2B and 7B, Qwen2.5-VL-7B, Qwen3-VL-2B, LLaVA-OneVision-7B, InternVL3-2B and 8B",
    30: "the built-in model, SmolVLM-256M",
    32: "LLaVA-1.5-7B, LLaVA-NeXT-7B, SmolVLM-500M, Idefics3-8B",
    36: "Qwen2.5-VL-3B, Qwen3-VL-4B and 8B",
    40: "LLaVA-1.5-13B",
    48: "InternVL3-9B and 14B",
    64: "Qwen2.5-VL-32B, Qwen3-VL-32B, InternVL3-38B",
    80: "Qwen2-VL-72B, Qwen2.5-VL-72B, InternVL3-78B",
}
"""Decoder layers of released models, as their configurations have them."""


# -- what MkDocs calls ----------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Navigation over what is there: pages that other parts of the project write come in."""
    stages: list[Any] = [{"Overview": "methods/index.md"}]
    for stage in STAGES:
        mine = [{name: f"methods/{stage}/{name}.md"} for name in _known(stage)]
        about = [f"methods/{stage}.md"] if (DOCS / "methods" / f"{stage}.md").exists() else []
        if mine or about:
            stages.append({stage: [*about, *mine]})
    config.nav = [
        {"Conduit": "index.md"},
        {"Plans": "plans.md"},
        {"Defaults per model": "defaults.md"},
        {"Methods": stages},
        {"Guides": _there(GUIDES)},
        {"Inside": _there(INSIDE)},
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Pages that are made from the code."""
    made = {"methods/index.md": overview(), "commands.md": commands(), "changes.md": changes()}
    for name, method in registry().items():
        made[f"methods/{method.stage}/{name}.md"] = method_page(method)
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links that lead out of the site, to the repository's files, become their names."""

    def named(found: re.Match[str]) -> str:
        path = re.sub(r"^(\.\./)+", "", found[2])
        return found[0] if (DOCS / path).exists() else f"{found[1]} (`{path}`)"

    markdown = markdown.replace("<!-- depths -->", depths())
    return re.sub(r"\[([^\]]+)\]\(((?:\.\./)+[^)#]+)\)", named, markdown)


def on_page_content(text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Docstrings write references and formulas as Sphinx does."""
    text = re.sub(
        r":math:<code>(.*?)</code>", lambda m: convert(html.unescape(m[1])), text, flags=re.S
    )
    return re.sub(
        r":(?:class|func|meth|attr|mod|data):<code>[~.]*([^<]*)</code>", r"<code>\1</code>", text
    )


def _there(pages: tuple[tuple[str, str], ...]) -> list[dict[str, str]]:
    made = ("commands.md", "changes.md")
    return [{title: path} for title, path in pages if path in made or (DOCS / path).exists()]


def _known(stage: str) -> list[str]:
    known = registry()
    named = [name for name in NAMES[stage] if name in known]
    return named + [n for n, m in known.items() if m.stage == stage and n not in named]


# -- a page per method ----------------------------------------------------------------------------


def method_page(method: type[Method]) -> str:
    """Formula, options, what it does in decoding, when to use it, what was measured."""
    summary, body, parameters = docstring(method)
    acts_on, counts = STAGES[method.stage]
    lines = [f"# {method.name}", "", summary, ""]
    lines += [f"Stage **{method.stage}**: acts on {acts_on}.", ""]
    if method.paper:
        basis = "details read in the paper or the authors' code"
        if method.basis != "known":
            basis = "the paper's idea; details are our reconstruction"
        lines += [f"Paper: <{method.paper}>; {basis}.", ""]
    if method.takes_budget():
        lines += [f"Budget: {counts}.", ""]
    if when := _when().get(method.name):
        lines += ["## When to use it", "", when, ""]
    lines += [
        "## What it does",
        "",
        body,
        "",
        f"While the answer is decoded: {method.in_decode}.",
        "",
    ]
    lines += list(_options(method, parameters))
    lines += ["## What was measured", "", measured(method.name), ""]
    source = inspect.getsourcefile(method) or ""
    where = source[source.index("conduit_kv") :] if "conduit_kv" in source else source
    lines += [f"Source: `src/{where}`, class `{method.__name__}`."]
    return "\n".join(lines) + "\n"


def docstring(method: type[Method]) -> tuple[str, str, dict[str, str]]:
    """Summary, body as Markdown, and what is said of each parameter."""
    text = inspect.cleandoc(method.__doc__ or "")
    summary, _, rest = text.partition("\n\n")
    parts = re.split(r"^(\w[\w ]*)\n-{3,}\n", rest, flags=re.M)
    body, sections = parts[0], dict(zip(parts[1::2], parts[2::2], strict=True))
    parameters: dict[str, str] = {}
    for base in reversed(method.__mro__):
        said = inspect.cleandoc(base.__dict__.get("__doc__") or "")
        found = re.search(r"^Parameters\n-+\n(.*?)(?=^\w[\w ]*\n-{3,}\n|\Z)", said, re.M | re.S)
        if found:
            parameters |= _parameters(found[1])
    for title in sections:
        if title not in ("Parameters", "Attributes"):
            body += f"\n\n**{title}**\n\n{sections[title]}"
    return markdown(summary), markdown(body), parameters


def _parameters(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    names: list[str] = []
    for line in text.splitlines():
        if line and not line.startswith(" "):
            names = [name.strip() for name in line.partition(":")[0].split(",")]
            found |= dict.fromkeys(names, "")
        elif line.strip():
            for name in names:
                found[name] = f"{found[name]} {line.strip()}".strip()
    return found


def _options(method: type[Method], said: dict[str, str]) -> Iterator[str]:
    fields = [field for field in dataclasses.fields(method) if field.name != "budget"]
    if not fields:
        return
    yield "## Options"
    yield ""
    yield "| option | values | default | |"
    yield "|---|---|---|---|"
    for field in fields:
        kind = str(field.type).replace("|", "\\|").replace("Literal", "")
        default = "-" if field.default is dataclasses.MISSING else f"`{field.default}`"
        text = markdown(said.get(field.name, "")).replace("|", "\\|").replace("\n", " ")
        yield f"| `{field.name}` | `{kind}` | {default} | {text} |"
    yield ""


def markdown(text: str) -> str:
    """A docstring's reStructuredText as Markdown, formulas as MathML."""

    def block(found: re.Match[str]) -> str:
        latex = inspect.cleandoc(found[2] or "") or found[1].strip()
        shown = convert(" ".join(latex.split()), display="block")
        return f'\n<div class="formula">{shown}</div>\n'

    text = re.sub(
        r"^\.\. math::[ \t]*(.*)\n((?:(?:[ \t]+.*)?\n)*(?:[ \t]+.*)?)",
        block,
        text + "\n",
        flags=re.M,
    )
    text = re.sub(r":math:`([^`]*)`", lambda m: convert(" ".join(m[1].split())), text)
    # A line that begins with an element would begin a block.
    text = re.sub(r'(?<=[^\n])\n *(?=<math[^>]*display="inline")', " ", text)
    text = re.sub(r":(?:class|func|meth|attr|mod|data):`[~.]*([^`]*)`", r"`\1`", text)
    return text.replace("``", "`").strip()


def _when() -> dict[str, str]:
    found: dict[str, str] = yaml.safe_load((DOCS / "when.yaml").read_text(encoding="utf-8"))
    return found


# -- what was measured ----------------------------------------------------------------------------


def measured(name: str) -> str:
    """A method's curve on every task beside full and chance, if results are there."""
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for file in sorted(RESULTS.glob("*/*.json")):
        for row in json.loads(file.read_text(encoding="utf-8"))["rows"]:
            key = (row["task"], row["plan"])
            if row["control"] is None and (key not in best or best[key]["n"] < row["n"]):
                best[key] = row
    rows = list(best.values())
    parts = []
    for task in dict.fromkeys(row["task"] for row in rows):
        here = [row for row in rows if row["task"] == task]
        mine = [
            r for r in here if re.match(rf"{re.escape(name)}:[0-9.]+(\(of=visual\))?$", r["plan"])
        ]
        chance = [r for r in here if r["plan"].startswith("text-random:")]
        if mine:
            full = mine[0]["accuracy"] - mine[0]["vs_full"]["mean"]
            n = min(row["n"] for row in mine)
            parts += [f"**{task}**, n = {n}", "", curve(mine, chance, full), ""]
    if not parts:
        return "Not measured yet: `make usage` and `make bench` write the results shown here."
    model = rows[0]["model"]
    note = f"Accuracy against the share of K/V held; bars are 95 % intervals; model {model}."
    return "\n".join(
        [note + " Dashed: the full cache; dotted: text kept, the rest by chance.", "", *parts]
    )


def curve(rows: list[dict[str, Any]], chance: list[dict[str, Any]], full: float) -> str:
    """A small drawing that follows the theme."""
    width, height, left, low = 460, 190, 40, 160

    def x(row: dict[str, Any]) -> float:
        return left + (width - left - 10) * row["kv_bytes"] / row["full_bytes"]

    def y(value: float) -> float:
        return low - (low - 12) * value

    def line(points: list[dict[str, Any]], style: str) -> str:
        ordered = sorted(points, key=x)
        at = " ".join(f"{x(row):.1f},{y(row['accuracy']):.1f}" for row in ordered)
        return f'<polyline points="{at}" fill="none" {style}/>'

    parts = [f'<path class="axis" d="M{left} 12V{low}H{width - 10}"/>']
    parts += [f'<text x="6" y="{y(v) + 4:.0f}">{v:.0%}</text>' for v in (0, 0.5, 1)]
    parts += [
        f'<text x="{left + (width - left - 10) * v - 8:.0f}" y="{low + 16}">{v:.0%}</text>'
        for v in (0.1, 0.2, 0.5, 1)
    ]
    level = f"M{left} {y(full):.1f}H{width - 10}"
    parts.append(f'<path d="{level}" stroke="currentColor" stroke-dasharray="5 4"/>')
    parts.append(line(chance, 'stroke="#8d949c" stroke-width="2" stroke-dasharray="2 4"'))
    parts.append(line(rows, 'stroke="#0b72b5" stroke-width="2"'))
    for row in rows:
        bar = f"M{x(row):.1f} {y(row['accuracy_low']):.1f}V{y(row['accuracy_high']):.1f}"
        title = f"<title>{html.escape(row['plan'])}: {row['accuracy']:.1%}</title>"
        at = f'cx="{x(row):.1f}" cy="{y(row["accuracy"]):.1f}"'
        parts.append(f'<path d="{bar}" stroke="#0b72b5"/>')
        parts.append(f'<circle {at} r="4" fill="#0b72b5">{title}</circle>')
    drawn = "".join(parts)
    return f'<div class="curve"><svg viewBox="0 0 {width} {height}">{drawn}</svg></div>'


# -- tables of other pages ------------------------------------------------------------------------


def depths() -> str:
    """Default layers by depth."""
    lines = [
        "| layers | models | FastV | PDrop | Reroute over PDrop | Nuwa | Nuwa with reroute "
        "| ReToken, at most |",
        "|---|---|---|---|---|---|---|---|",
    ]
    kinds = (("fastv", False), ("pdrop", False), ("pdrop", True), ("nuwa", False), ("nuwa", True))
    for depth, models in DEPTHS.items():
        stages = [
            ", ".join(str(layer) for layer in RULES[rule].layers(depth, waits))
            for rule, waits in kinds
        ]
        lines.append(f"| {depth} | {models} | {' | '.join(stages)} | {depth // 4} |")
    return "\n".join(lines)


# -- overview, commands, changes ------------------------------------------------------------------


def overview() -> str:
    """All methods by stage."""
    lines = ["# Methods", "", "A plan is at most one method per stage, in the order of a visual "
             "token's life.", ""]  # fmt: skip
    for stage, (acts_on, counts) in STAGES.items():
        lines += [f"## {stage}", "", f"Acts on {acts_on}. The budget counts {counts}.", ""]
        if (DOCS / "methods" / f"{stage}.md").exists():
            lines += [f"[About this stage]({stage}.md)", ""]
        known = _known(stage)
        if known:
            lines += ["| method | what it keeps | paper |", "|---|---|---|"]
            for name in known:
                method = registry()[name]
                paper = f"<{method.paper}>" if method.paper else "control"
                lines.append(f"| [{name}]({stage}/{name}.md) | {docstring(method)[0]} | {paper} |")
            lines.append("")
        later = [f"`{name}`" for name in NAMES[stage] if name not in known]
        if later:
            lines += [f"Known by name, not in this version: {', '.join(later)}.", ""]
    return "\n".join(lines)


def commands() -> str:
    """Every command with its options, as ``--help`` has them."""
    lines = ["# Commands", "", "`conduit-kv COMMAND --help` prints the same.", ""]
    group = typer.main.get_command(app)
    lines += list(_command(group, "conduit-kv", 2))
    return "\n".join(lines)


def _command(command: Any, path: str, level: int) -> Iterator[str]:
    for name, sub in getattr(command, "commands", {}).items():
        whole = f"{path} {name}"
        yield f"{'#' * level} {whole}"
        yield ""
        yield (sub.help or "").replace("\f", "")
        yield ""
        rows = [param for param in sub.params if not getattr(param, "hidden", False)]
        shown = [param for param in rows if "--help" not in param.opts]
        if shown and not hasattr(sub, "commands"):
            yield "| | |"
            yield "|---|---|"
            for param in shown:
                text = str(getattr(param, "help", "") or "").replace("|", "\\|").replace("\n", " ")
                text = text.replace("{", "&#123;")
                names = ", ".join(f"`{name}`" for name in param.opts)
                yield f"| {names} | {text} |"
            yield ""
        yield from _command(sub, whole, level + 1)


def changes() -> str:
    """The changelog as it is."""
    return (DOCS.parent / "CHANGELOG.md").read_text(encoding="utf-8")
