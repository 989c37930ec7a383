"""`python -m train.export`: write trained weights for open_clip, sentence-transformers, DPR or ONNX."""
