"""Integrations with other inference engines. Each needs that engine installed, and is imported only when it is used."""
