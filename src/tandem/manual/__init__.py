"""The bundled documentation: found, split into sections and shown by `tandem docs`.

A wheel has a copy of the repository's `docs` in the folder `text`.
"""
