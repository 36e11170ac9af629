"""The documentation as it comes with the program: found, cut into sections, shown by `tandem docs`.

`text` is the folder `docs` of the repository; a wheel holds a copy of it.
"""
