"""`python -m train.export`: weights for open_clip, sentence-transformers, DPR, ONNX."""
