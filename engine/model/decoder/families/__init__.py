"""The families of the table: what fills an `Architecture` from a config; configs that are read without transformers."""
