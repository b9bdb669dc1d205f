"""The graph: pipelines as typed data, from YAML or Python, checked before a weight is loaded.

Imports no torch.  Knows neither processes nor messages.
"""

from omnistage.graph.builder import Graph
from omnistage.graph.loader import load_pipeline
from omnistage.graph.route import Route, plan_route
from omnistage.graph.spec import EdgeSpec, PipelineSpec, StageSpec

__all__ = ["EdgeSpec", "Graph", "PipelineSpec", "Route", "StageSpec", "load_pipeline", "plan_route"]
