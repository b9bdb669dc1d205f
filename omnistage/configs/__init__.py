"""The built-in pipelines: one YAML file each, found by name (omnistage.graph.loader)."""
