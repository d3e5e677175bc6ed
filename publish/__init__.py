"""Programs that publish the course; each reads the notebooks and writes one folder, an "edition".

    python -m publish.student   # no solutions, no outputs
    python -m publish.slides    # a deck per lesson and language
    python -m publish.site      # the website, which Sphinx makes

They read the executed notebooks. Each program writes a temporary folder, which replaces the
requested folder once it is complete, so an error leaves the earlier files untouched. `make
student`, `make slides` and `make site` call these programs.
"""
