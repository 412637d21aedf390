"""JSON Schemas as rules of Lark, exactly: what they accept is written out here."""
