"""Export and import: Parquet tables, JSONL chats, folders for Hugging Face datasets.

An export is derived from the log at a cut and can be made again. An import appends events like any writer.
"""
