// The reference of DPO: the losses of all pairs under the model that the run starts from.
// Checkpoints have them as reference.bin, so that a resumed run continues with the same.
#pragma once

#include "../runs/run_data.h"
#include "model_face.h"

// Computes them in one pass over training and validation data, or reads them from the checkpoint
// (directory "": none), for steps loaded from then on and for the validation set. Every rank calls
// it. EXIT_CHECKPOINT_MISFIT where the checkpoint has those of other data.
bool reference_open(Data *d, ModelFace m, const char *checkpoint, Error *err);
