"""x"""
from tests.support.mistakes import Rows
ROWS = Rows()
