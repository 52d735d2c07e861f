"""The plan tree: which stage runs on how many devices, in turns or side by side. Knows no seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from headrace_planner.errors import refuse


@dataclass(frozen=True)
class Leaf:
    """One stage on `devices` devices of one kind."""

    stage: str
    kind: str
    devices: int


@dataclass(frozen=True)
class Cycle:
    """Two stages that advance turn by turn, such as generate ⇄ simulate.

    `shared`: both on the same devices, one after the other in every turn. Otherwise side by side, with the items
    in `batches` parts that alternate, so that one part is simulated while another one is generated for.
    """

    first: Leaf
    second: Leaf
    batches: int = 1
    shared: bool = False


@dataclass(frozen=True)
class Share:
    """Children take turns on the same devices. `resident`: all stay loaded; else each is loaded for its turn."""

    children: tuple[Node, ...]
    resident: bool = False


@dataclass(frozen=True)
class Split:
    """Two parts on devices of their own; the first hands over in `chunks` pieces, the second works meanwhile.

    With one chunk the second part waits for the whole batch. Parts that exchange nothing run in parallel.
    """

    first: Node
    second: Node
    chunks: int = 1


Node = Leaf | Cycle | Share | Split


def leaves(node: Node) -> Iterator[Leaf]:
    """Leaves from left to right."""
    match node:
        case Leaf():
            yield node
        case Share(children):
            for child in children:
                yield from leaves(child)
        case Cycle(first, second) | Split(first, second):
            yield from leaves(first)
            yield from leaves(second)


def devices(node: Node) -> dict[str, int]:
    """Devices that a tree occupies, by kind: Split adds them, Share takes the most."""
    match node:
        case Leaf(_, kind, count):
            return {kind: count}
        case Share(children):
            return _join([devices(child) for child in children], add=False)
        case Cycle(first, second, _, shared):
            return _join([devices(first), devices(second)], add=not shared)
        case Split(first, second):
            return _join([devices(first), devices(second)], add=True)


def _join(parts: list[dict[str, int]], add: bool) -> dict[str, int]:
    kinds = sorted({kind for part in parts for kind in part})
    return {kind: (sum if add else max)(part.get(kind, 0) for part in parts) for kind in kinds}


def to_data(node: Node) -> dict[str, object]:
    """A tree as plain data; `from_data` reads it again."""
    match node:
        case Leaf(stage, kind, count):
            return {"stage": stage, "kind": kind, "devices": count}
        case Cycle(first, second, batches, shared):
            pair = [to_data(first), to_data(second)]
            return {"cycle": pair, "shared": True} if shared else {"cycle": pair, "batches": batches}
        case Share(children, resident):
            return {"share": [to_data(child) for child in children], "resident": resident}
        case Split(first, second, chunks):
            return {"split": [to_data(first), to_data(second)], "chunks": chunks}


def from_data(data: Mapping[str, object], key: str = "tree") -> Node:
    """A tree from plain data.

    >>> from_data({"share": [{"stage": "generate", "devices": 8}], "resident": True})
    Share(children=(Leaf(stage='generate', kind='gpu', devices=8),), resident=True)

    PlanError names the key that is wrong.
    """
    if "stage" in data:
        count = _count(data, "devices", key)
        return Leaf(str(data["stage"]), str(data.get("kind", "gpu")), count)
    for name in ("share", "split", "cycle"):
        if name in data:
            children = tuple(from_data(child, f"{key}.{name}[{n}]") for n, child in _listed(data[name], key))
            return _inner(name, children, data, f"{key}.{name}")
    raise refuse(
        key, f"has none of stage, share, split, cycle but {', '.join(sorted(data)) or 'nothing'}", "name one"
    )


def _inner(name: str, children: tuple[Node, ...], data: Mapping[str, object], key: str) -> Node:
    if name == "share":
        return Share(children, bool(data.get("resident", False)))
    if len(children) != 2:
        raise refuse(key, f"has {len(children)} parts", "give two")
    first, second = children
    if name == "split":
        return Split(first, second, _count(data, "chunks", key) if "chunks" in data else 1)
    if not (isinstance(first, Leaf) and isinstance(second, Leaf)):
        raise refuse(key, "a cycle joins two stages", "name a stage on each side")
    return Cycle(
        first, second, _count(data, "batches", key) if "batches" in data else 1, bool(data.get("shared"))
    )


def _listed(value: object, key: str) -> list[tuple[int, Mapping[str, object]]]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, Mapping) for item in value):
        raise refuse(key, f"{value!r} is not a list of trees", "write a list of mappings")
    return list(enumerate(value))


def _count(data: Mapping[str, object], name: str, key: str) -> int:
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise refuse(f"{key}.{name}", f"is {value!r}", "use a whole number, at least 1")
    return value


def draw(node: Node, indent: str = "") -> list[str]:
    """A tree as lines of text, two spaces a level."""
    match node:
        case Leaf(stage, kind, count):
            return [f"{indent}{stage} on {count} {kind}"]
        case Cycle(first, second, batches, shared):
            how = (
                "in turns on the same devices"
                if shared
                else "side by side" + (f", {batches} alternating parts" if batches > 1 else "")
            )
            head = f"{indent}cycle {first.stage} ⇄ {second.stage}, {how}"
            children: tuple[Node, ...] = (first, second)
        case Share(children, resident):
            head = f"{indent}share, in turns, {'all stay loaded' if resident else 'loaded for each turn'}"
        case Split(first, second, chunks):
            head = f"{indent}split, side by side, {chunks} chunk{'s' if chunks > 1 else ''}"
            children = (first, second)
    return [head, *(line for child in children for line in draw(child, indent + "  "))]
