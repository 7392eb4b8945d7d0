"""What updates the parameters, on which device, and the factor that multiplies gradients.

on_device.py                        the seam, and the update where the model computes
one_pass.py                         fused AdamW that reads 16-bit gradients and writes parameters in one pass
offload.py  disk.py                 the update on the CPU, states in host memory or in files
factor.py  clip.py  loss_scale.py   the factor; that of a clip, and that of fp16's loss scale
"""
