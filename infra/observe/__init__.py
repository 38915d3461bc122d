"""What looks at a run from outside: Prometheus, its alert rules, Grafana's dashboards as code."""
