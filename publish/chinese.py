"""Chinese characters, for modules that import nothing else of the course."""

HAN = "[\u3400-\u4dbf\u4e00-\u9fff]"
