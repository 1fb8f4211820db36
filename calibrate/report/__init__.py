"""The report: one HTML file that says what a calibration, or an advice, is worth; it asks no network."""

from .advice import advice_page as advice_page
from .calibration import calibration_page as calibration_page
