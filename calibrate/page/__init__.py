"""The report page: one HTML file that says what a calibration, or an advice, is worth; it asks no network."""

from .advice_page import advice_page as advice_page
from .calibration_page import calibration_page as calibration_page
