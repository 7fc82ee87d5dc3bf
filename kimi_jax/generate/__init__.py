"""Turning logits into tokens: the decode loop and sampling."""
