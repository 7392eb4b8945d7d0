"""What train_gpt.py is made of.

gpt.py  text.py  gpt2_file.py  the model; the data; weights in Hugging Face's format
options.py  launch.py          flags; how ranks start and end
fits.py  resume.py             whether the model fits; going on from a checkpoint
screen.py  report.py           what is printed
"""
