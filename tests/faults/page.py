def write_page(path, results):
    raise NotImplementedError
