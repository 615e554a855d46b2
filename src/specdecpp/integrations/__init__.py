"""Doors into the engines that people already run. Each needs that engine, and none is imported unless it is asked for."""
