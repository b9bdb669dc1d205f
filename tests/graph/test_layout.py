from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omnistage.graph.layout import place


@st.composite
def graphs(draw):
    count = draw(st.integers(1, 7))
    names = [f"n{index}" for index in range(count)]
    sizes = {
        name: (draw(st.sampled_from([40.0, 112.0])), draw(st.sampled_from([30.0, 70.0]))) for name in names
    }
    pairs = [(a, b) for index, a in enumerate(names) for b in names[index + 1 :]]
    return sizes, [pair for pair in pairs if draw(st.integers(0, 2)) == 0]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(graphs())
def test_boxes_do_not_overlap_and_edges_run_to_the_right(graph):
    sizes, edges = graph
    layout = place(sizes, edges)
    nodes = list(layout.nodes.values())
    for index, one in enumerate(nodes):
        assert one.x - one.width / 2 >= -1e-6
        assert one.x + one.width / 2 <= layout.width + 1e-6
        assert one.y - one.height / 2 >= -1e-6
        assert one.y + one.height / 2 <= layout.height + 1e-6
        for other in nodes[index + 1 :]:
            apart_x = abs(one.x - other.x) >= (one.width + other.width) / 2
            apart_y = abs(one.y - other.y) >= (one.height + other.height) / 2 + 1
            assert apart_x or apart_y, (one, other)
    for start, end in edges:
        path = [layout.nodes[name] for name in layout.paths[start, end]]
        assert [node.column for node in path] == list(range(path[0].column, path[-1].column + 1))
        assert (path[0].name, path[-1].name) == (start, end)


def test_a_chain_is_straight():
    sizes = dict.fromkeys("abcd", (112.0, 70.0))
    layout = place(sizes, [("a", "b"), ("b", "c"), ("c", "d")])
    assert len({round(layout.nodes[name].y, 3) for name in "abcd"}) == 1


def test_sources_sit_next_to_what_they_feed():
    sizes = dict.fromkeys(("a", "b", "c", "late"), (112.0, 70.0))
    layout = place(sizes, [("a", "b"), ("b", "c"), ("late", "c")])
    assert layout.nodes["late"].column == 1


def test_nothing_at_all_can_be_placed():
    layout = place({}, [])
    assert layout.nodes == {}
