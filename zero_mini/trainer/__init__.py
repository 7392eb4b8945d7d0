"""The parts of train_gpt.py.

gpt.py  text.py  gpt2_file.py  the model; the data; weights in Hugging Face's format
options.py  launch.py          flags; how ranks meet, and how they end
job.py  fits.py  resume.py     a rank's work, prepared; a check that the model fits; saving and resuming
screen.py  printout.py         the terminal; what rank 0 prints on it
report.py                      tables and files
"""
