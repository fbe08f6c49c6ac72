"""The algorithm: tensors in, tensors out. Knows no model, no tokenizer, no file, no device and no clock."""
