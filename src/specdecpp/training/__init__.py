"""Offline work: from prompts to a calibrated head. Nothing that decodes imports it.

prompts -> collect (responses, labels) -> train (head) -> calibrate -> evaluate
"""
