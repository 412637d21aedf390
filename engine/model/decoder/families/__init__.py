"""The families of the table: functions from config to `Architecture`; configs read without transformers."""
