"""The image–text data set: samples, images, transforms, streaming."""
