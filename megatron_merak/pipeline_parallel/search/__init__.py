"""Schedules found by search, for given costs, links and memory."""
