"""Converts JSON Schemas to Lark rules, exactly."""
