"""The report page: one HTML file that says what a calibration, or an advice, is worth; it asks no network."""

from .advice_sections import advice_page as advice_page
from .calibration_sections import calibration_page as calibration_page
