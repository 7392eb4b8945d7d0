"""The parts of train_gpt.py.

gpt.py  text.py  gpt2_file.py  the model; the data; weights in Hugging Face's format
options.py  launch.py          flags; how ranks start and end
fits.py  resume.py             a check that the model fits; saving and resuming
screen.py  report.py           the terminal; tables and files
"""
