"""Onto a medium, all or nothing."""
