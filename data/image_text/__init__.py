"""The image–text data set: samples, pictures, transforms, streaming."""
