"""`headrace search`: builds an index of texts, serves it, and asks it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from headrace_cli.commands.options import JsonFlag
from headrace_cli.errors import user_error
from headrace_cli.output import console, error_console, print_json

if TYPE_CHECKING:
    from headrace_search.index import By

# `headrace --help` lists these commands: what they need is imported as they run.
app = typer.Typer(help="Search over texts of your own, for the tool search.", no_args_is_help=True)
Folder = Annotated[Path, typer.Argument(metavar="INDEX", help="Folder of the index.")]


@app.command("build")
def build_index(
    corpus: Annotated[
        Path, typer.Argument(metavar="CORPUS", help="JSON lines: a text, or an object with a key.")
    ],
    folder: Folder,
    model: Annotated[
        Path | None, typer.Option(help="Folder of an embedding model: find texts by meaning too.")
    ] = None,
    key: Annotated[str, typer.Option(help="The key of a line's text.")] = "text",
    words: Annotated[bool, typer.Option(help="Find texts by their words (BM25).")] = True,
    kind: Annotated[str, typer.Option(help="Index of the vectors, as faiss names it.")] = "Flat",
    device: Annotated[str, typer.Option(help="Where the model embeds the texts: cpu, cuda.")] = "cpu",
    query_prompt: Annotated[str | None, typer.Option(help="As 'query: '; default: the model's.")] = None,
    text_prompt: Annotated[str | None, typer.Option(help="As 'passage: '; default: the model's.")] = None,
) -> None:
    """Build an index of a corpus."""
    from headrace_search.index import Embedder, SearchProblem, build

    embedder = None
    if model is not None:
        embedder = Embedder(path=str(model.absolute()), query_prompt=query_prompt, text_prompt=text_prompt)
    try:
        with error_console().status("texts: 0") as status:
            about = build(
                corpus,
                folder.absolute(),
                key=key,
                words=words,
                embedder=embedder,
                kind=kind,
                device=device,
                progress=lambda done: status.update(f"texts: {done:,}"),
            )
    except SearchProblem as error:
        raise user_error("search", error.problem, error.fix) from error
    console().print(f"{about.texts:,} texts in {folder}")


@app.command()
def serve(
    folder: Folder,
    host: Annotated[
        str, typer.Option(help="Address; beyond loopback set HEADRACE_SEARCH_TOKEN.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port.")] = 8100,
) -> None:
    """Serve an index, for simulators of several hosts."""
    from headrace_search.index import SearchProblem
    from headrace_search.server import serve as run

    try:
        run(folder.absolute(), host, port)
    except SearchProblem as error:
        raise user_error("search", error.problem, error.fix) from error


@app.command()
def ask(
    folder: Folder,
    query: Annotated[str, typer.Argument(metavar="QUERY")],
    count: Annotated[int, typer.Option(min=1, max=100, help="Texts to find.")] = 3,
    by: Annotated[str | None, typer.Option(help="words, meaning or both.")] = None,
    json_output: JsonFlag = False,
) -> None:
    """Find texts, as the tool does."""
    from headrace_search.index import Index, SearchProblem

    ways: dict[str | None, By | None] = {None: None, "words": "words", "meaning": "meaning", "both": "both"}
    try:
        if by not in ways:
            raise SearchProblem(f"there is no --by {by}", "write words, meaning or both")
        (found,) = Index(folder.absolute()).search([query], count, ways[by])
    except SearchProblem as error:
        raise user_error("search", error.problem, error.fix) from error
    if json_output:
        print_json([each._asdict() for each in found])
        return
    for each in found:
        console().print(f"[{each.row}] {each.score:.3f}  {each.text}", markup=False, soft_wrap=True)
